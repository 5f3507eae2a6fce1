"""The programs of the matrix."""

from __future__ import annotations

from dataclasses import dataclass

from matrix.cells import Program

FEATURES = {
    "optimizer": "adamw sgd twooptimizers adversary lbfgs scaler clipnorm clipvalue accumulate",
    "schedule": "schedule steps plateau groups",
    "data": "shuffle inorder ragged workers persistent stateful stream kempner augmenteddata",
    "random": "dropout numpynoise pythonnoise randomevaluation",
    "state": "best early custom replay perrank",
    "model": "average batchnorm frozen tied compiled sharded byhand nodata",
}
"""Of the plain loop, by family: the classes of `programs/plain.py` and `optimizers.py`, in small
letters."""

RANKS_DIFFER = {
    "dropout": "each rank drops other values",
    "randomevaluation": "each rank drops other values",
    "numpynoise": "each rank draws its own noise",
    "pythonnoise": "each rank draws its own sign",
    "perrank": "a generator of each rank's own",
    "custom": "each rank knows its own losses",
    "replay": "each rank knows its own samples",
    "batchnorm": "each rank has statistics of its own batches",
    "ragged": "the mean over two small batches weighs other samples more",
    "stream": "a stream's place is that of a rank's shards",
}
"""Features whose losses depend on the number of ranks, undisturbed or not, and why."""

PER_RANK = ("perrank", "custom", "replay", "stream")
"""Of these, those with a state of each rank's own."""

GENERATES = "what its trainer generates depends on the ranks: go on with as many"

HUGGING_FACE = (
    Program("hugging_face.py", "Trainer", "steps"),
    Program("hugging_face.py", "Trainer", "epochs", 15, save_every=5, evaluate_every=5),
    Program("hugging_face.py", "Trainer", "best", save_every=3),
    Program("hugging_face.py", "Trainer", "best_epoch", save_every=5, evaluate_every=5),
    Program("hugging_face.py", "Trainer", "early", 9, save_every=3),
    Program("hugging_face.py", "Trainer", "plateau"),
    Program("hugging_face.py", "Trainer", "accumulate", epoch=3, micro=2),
    Program("hugging_face.py", "Trainer", "workers"),
    Program("hugging_face.py", "Trainer", "dropout", worlds=False),
    Program("hugging_face.py", "Trainer", "cosine"),
    Program("hugging_face.py", "SFT", "steps"),
    Program("hugging_face.py", "SFT", "best", save_every=3),
    Program("hugging_face.py", "LoRA", "steps"),
    Program("hugging_face.py", "LoRA", "best", save_every=3),
    Program("hugging_face.py", "DPO", "steps"),
    Program("hugging_face.py", "DPO", "accumulate", epoch=3, micro=2),
    Program("hugging_face.py", "GRPO", "generations", evaluate_every=0, epoch=0, refused=GENERATES),
    Program("hugging_face.py", "GRPO", "steps", evaluate_every=0, epoch=0, refused=GENERATES),
    Program(
        *("hugging_face.py", "GRPO", "buffered"),
        evaluate_every=0,
        epoch=0,
        micro=2,
        refused=GENERATES,
    ),
)
HUGGING_FACE_MODULES = (
    "datasets",
    "peft",
    "transformers",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "trl",
    "trl.trainer.sft_trainer",
    "trl.trainer.dpo_trainer",
    "trl.trainer.grpo_trainer",
    "kempner.integrations.transformers",
)


LIGHTNING = (
    Program("with_lightning.py", "Lightning", "steps", evaluate_every=5),
    Program("with_lightning.py", "Lightning", "epochs", 15, evaluate_every=5),
    Program(
        "with_lightning.py", "Lightning", "accumulate", 20, save_every=3, evaluate_every=5, micro=2
    ),
    Program(
        "with_lightning.py", "Lightning", "ragged", 15, save_every=3, evaluate_every=3, epoch=3
    ),
    Program("with_lightning.py", "Lightning", "interval", save_every=4),
    Program("with_lightning.py", "Lightning", "half", 12, evaluate_every=2, epoch=4),
    Program("with_lightning.py", "Lightning", "every_other", 20, evaluate_every=10),
    Program("with_lightning.py", "Lightning", "plateau", 15, evaluate_every=5),
    Program("with_lightning.py", "Lightning", "by_epoch", 15, evaluate_every=5),
    Program("with_lightning.py", "Lightning", "early", 10, evaluate_every=5),
    Program("with_lightning.py", "Lightning", "best", 15, evaluate_every=5),
    Program("with_lightning.py", "Lightning", "workers", evaluate_every=5),
    Program("with_lightning.py", "Lightning", "dropout", evaluate_every=5, worlds=False),
    Program("with_lightning.py", "Lightning", "clip", evaluate_every=5),
    Program("with_lightning.py", "Lightning", "logged", 15, evaluate_every=5, worlds=False),
    Program("with_lightning.py", "Lightning", "metric", 15, evaluate_every=5, worlds=False),
    Program("with_lightning.py", "Lightning", "weighted", evaluate_every=5, worlds=False),
    Program("with_lightning.py", "Lightning", "augmented", evaluate_every=5, worlds=False),
    Program("with_lightning.py", "Lightning", "stateful", evaluate_every=5, worlds=False),
    Program(
        "with_lightning.py",
        "Lightning",
        "stream",
        evaluate_every=5,
        ranks=(1,),
        refused="is one for each rank; start as many ranks",
    ),
    Program("with_lightning.py", "Lightning", "manual", save_every=2, evaluate_every=5),
    Program("with_lightning.py", "Lightning", "uneven", 15, evaluate_every=5, worlds=False),
    Program("with_lightning.py", "Lightning", "defaults", 15, evaluate_every=5),
)
SHELLS = tuple(
    Program(
        "wrapped.py",
        kind,
        variant,
        micro=2 if variant == "accumulate" else 1,
    )
    for kind in ("Fabric", "Accelerate")
    for variant in ("plain", "workers", "accumulate", "schedule", "clip")
)
LIGHTNING_MODULES = (
    "accelerate",
    "lightning.pytorch",
    "lightning.fabric",
    "kempner.integrations.lightning",
)

TITAN = tuple(
    Program(
        "titan.py",
        "torchtitan",
        variant,
        evaluate_every=0,
        micro=2 if variant == "accumulate" else 1,
        heeds=False,
        refused="dataloader",
        by_others=True,
    )
    for variant in ("plain", "accumulate")
)

TITAN_MODULES = (
    "datasets",
    "tokenizers",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "torchao",
    "torchdata.stateful_dataloader",
    "tyro",
)
"""torchtitan itself is prepared for the CPU before it is imported."""

PLAIN = tuple(
    Program(
        "plain.py",
        "plain",
        feature,
        9 if feature == "early" else 14,
        micro=2 if feature == "accumulate" else 1,
        ranks={"sharded": (2,)}.get(feature, (1, 2)),
        worlds=feature not in RANKS_DIFFER,
        family=family,
        refused="among which it cannot be divided" if feature in PER_RANK else "",
    )
    for family, features in FEATURES.items()
    for feature in features.split()
)


@dataclass(frozen=True)
class File:
    """The programs of one test file, the modules that they import, and how many of their cells
    `make check` plays."""

    programs: tuple[Program, ...]
    modules: tuple[str, ...]
    drawn: int


FILES = {
    "test_plain": File(PLAIN, ("datasets", "torchdata.stateful_dataloader"), 24),
    "test_hugging_face": File(HUGGING_FACE, HUGGING_FACE_MODULES, 18),
    "test_lightning": File((*LIGHTNING, *SHELLS), LIGHTNING_MODULES, 16),
    "test_titan": File(TITAN, TITAN_MODULES, 2),
}
