"""The configuration: one typed, strict, frozen section per TOML table.

A field's docstring and its `Key` are its documentation: `kempner config explain` prints them. A
field exists only if code uses it.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from kempner.config.errors import COLLECTOR, NAME, PORTS, SET_NAME
from kempner.config.integrity import IntegritySection
from kempner.config.model import (
    AdapterSection,
    ModelSection,
    ParallelismSection,
    PreferencesSection,
)
from kempner.config.resilience import ResilienceSection
from kempner.config.section import (
    PURE,
    Beta,
    Fraction,
    Key,
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    Section,
    Text,
)
from kempner.config.site import DistributedSection, HooksSection, SlurmSection

ProgramCode = Annotated[int, Field(ge=0, le=255)]


class ProgramSection(Section):
    """A program of your own (`kempner supervise -- COMMAND`) that does not import kempner: how it
    reports progress, and what its exit codes mean."""

    progress_file: Annotated[PathText | None, Key(example="out/step.txt")] = None
    """A file that the program keeps changing, relative to the folder in which `kempner supervise`
    was started. If it holds just a number, that is the step, counted since the run began; otherwise
    a change is only a sign of life. `kempner heartbeat --step N` in the program needs no file."""
    progress_pattern: Annotated[
        Text | None,
        Key(example="step[ =:]+([0-9]+)", form="regular expression (Python's) with a group"),
    ] = None
    """Regular expression (Python's) that is searched in each line that a rank prints; its first
    group is the step, counted since the run began, as in "step[ =:]+([0-9]+)". The rank's standard
    output and error then go into one pipe. Does not apply to ranks that srun starts itself."""

    done_codes: Annotated[list[ProgramCode], Key("exit codes", [0, 3])] = [0]  # noqa: RUF012 - pydantic copies it
    """Exit codes of a rank that is done. The run is complete when all ranks are. After a stop
    request, 0 does not count as done, since programs that save on SIGTERM exit with 0, too; other
    codes here, and `kempner heartbeat --complete`, still count."""
    requeue_codes: Annotated[list[ProgramCode], Key("exit codes", [75, 124])] = [75]  # noqa: RUF012 - pydantic copies it
    """Exit codes of a rank that wants to continue later: the other ranks are stopped, and the job
    is requeued."""
    fail_codes: Annotated[list[ProgramCode], Key("exit codes", [2])] = []  # noqa: RUF012 - pydantic copies it
    """Exit codes of a failure that a restart cannot fix: the run is given up at once. A code in
    none of the three lists has its meaning in docs/exit_codes.md, if it is there; otherwise it is a
    failure after which the ranks are restarted."""

    progress_seconds: Annotated[NonNegativeFloat, Key("seconds", 1200.0)] = 600.0
    """If a program's steps are unknown, an attempt that ran for this long before it failed has made
    progress: earlier restarts no longer count."""

    one_tracker_run: bool = True
    """Have Weights & Biases, MLflow and Comet show one run for all starts, by variables that they
    read. Variables that are already exported, and what the program sets itself, take precedence."""

    @model_validator(mode="after")
    def _has_a_step(self) -> Self:
        if self.progress_pattern is None:
            return self
        try:
            groups = re.compile(self.progress_pattern).groups
        except re.error as error:
            raise ValueError(f"progress_pattern is no regular expression: {error}") from None
        if not groups:
            raise ValueError(
                'progress_pattern needs a group for the step, as in "step ([0-9]+)"; put '
                "parentheses around the number"
            )
        return self

    @model_validator(mode="after")
    def _each_code_has_one_meaning(self) -> Self:
        codes = [*self.done_codes, *self.requeue_codes, *self.fail_codes]
        twice = sorted({code for code in codes if codes.count(code) > 1})
        if twice:
            raise ValueError(
                f"the exit code {twice[0]} is named twice in done_codes, requeue_codes and "
                "fail_codes; name it once"
            )
        return self

    @property
    def tells_progress(self) -> bool:
        """Whether the program reports progress: then a program without any is a hang."""
        return self.progress_file is not None or self.progress_pattern is not None


class ProfilingSection(Section):
    """Traces of chosen steps; `kempner profile` requests more during a run."""

    steps: Annotated[list[PositiveInt], Key("step numbers", [100, 5000])] = []  # noqa: RUF012 - pydantic copies it
    """Steps at which a trace begins; none by default."""
    length: Annotated[PositiveInt, Key("steps", 5)] = 2
    """Steps in a trace."""
    ranks: Annotated[list[NonNegativeInt], Key("rank numbers", [0, 8])] = [0]  # noqa: RUF012 - pydantic copies it
    """Ranks that each write a trace of those steps."""
    memory: bool = False
    """Also write a snapshot of GPU memory for pytorch.org/memory_viz."""
    keep: Annotated[PositiveInt, Key("traces", 20)] = 8
    """How many of a rank's newest traces are kept."""
    numerics: Annotated[PathText | None, Key(example="numerics.jsonl")] = None
    """A file for what each step computes: norms and fingerprints of the output of every module and
    its gradient, of every parameter's gradient and update. Steps take several times as long. Blocks
    that are compiled are seen from outside. `kempner replay --trace` sets it."""
    numerics_from: Annotated[PositiveInt | None, Key("step number", 1000)] = None
    """The first step that is written there; by default all are."""


class RunSection(Section):
    """Where the files of the run are: `<dir>/<name>/`."""

    name: Annotated[
        Annotated[str, Field(pattern=NAME, max_length=200)] | None,
        Key(example="first-try", form="letters, digits, `.`, `_` and `-`, at most 200"),
    ] = None
    """Name of the run's directory; the configuration file's stem by default."""
    dir: Annotated[PathText, Key(example="/shared/me/runs")] = "runs"
    """Folder that holds the runs; relative to the working directory."""


class TrainSection(Section):
    """Number of steps, batch sizes, precision."""

    max_steps: Annotated[PositiveInt, Key("steps", 20_000)] = 1000
    """Number of optimizer steps in the whole run."""
    global_batch_size: Annotated[PositiveInt, Key("sequences", 256)] = 8
    """Sequences per step over all ranks; fixed whatever the world size."""
    micro_batch_size: Annotated[PositiveInt, Key("sequences", 4)] = 1
    """Sequences per forward and backward pass on one rank; determines gradient accumulation."""
    seq_len: Annotated[PositiveInt, Key("tokens", 4096)] = 1024
    """Tokens per sequence."""
    seed: Annotated[
        int,
        Field(ge=0, lt=2**63),
        Key(PURE, 17, form="whole number of at most 63 bits, at least 0"),
    ] = 0
    """Seed of the initial weights, the sample order and dropout."""
    clip_grad_norm: Annotated[NonNegativeFloat, Key(PURE, 0.5)] = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Key(
            values={
                "auto": "bfloat16 on CUDA, float32 on CPU",
                "float32": "single precision everywhere",
                "bfloat16": "forward and backward in bfloat16",
            }
        ),
    ] = "auto"
    """Compute type. Master weights are float32."""
    loss_chunk: Annotated[NonNegativeInt, Key("tokens", 256)] = 1024
    """Most tokens of a micro batch whose logits exist at once: fewer need less memory, very few are
    slow. 0: the whole micro batch. Not for a model of your own."""
    activation_checkpointing: Annotated[
        Literal["none", "selective", "full"],
        Key(
            values={
                "none": "a block keeps all that its backward needs",
                "selective": "it keeps matrix products and attention, and recomputes the rest",
                "full": "it keeps its input, and recomputes everything",
            }
        ),
    ] = "none"
    """What a block recomputes in the backward instead of keeping it. Not for a model of your
    own."""
    activation_checkpointing_every: Annotated[PositiveInt | None, Key("blocks", 2)] = None
    """Apply activation_checkpointing to every n-th block only, beginning with the first; to all by
    default."""
    fp8: bool = False
    """Multiply the matrices of the blocks in float8, with torchao; needs a GPU with float8, and
    compile. Not for a model of your own."""
    compile: bool = False
    """Compile each block with torch.compile: the first step takes longer, all others less. The
    cache is kept in the run's directory for the next start. Not for a model of your own."""
    deterministic: bool = False
    """Allow only deterministic kernels (CUDA; on CPU they are deterministic anyway)."""
    log_samples: bool = False
    """Write all consumed samples to samples/, as positions in the sample order; one line per step
    and rank."""
    threads: Annotated[PositiveInt | None, Key("threads", 4)] = None
    """Threads for one rank's CPU kernels; results are bit-identical only for the same number.
    Default: OMP_NUM_THREADS, or the rank's share of the machine's cores."""
    same_on_any_world: bool | None = None
    """Add up gradients, losses and norms in an order that belongs to the samples, so that results
    are the same bits on any number of data parallel ranks, replicated or sharded. Needs threads,
    and memory for several whole gradients. Not for a model of your own."""

    @model_validator(mode="after")
    def _obeys_what_is_set(self) -> Self:
        if self.fp8 and not self.compile:
            raise ValueError("fp8=true needs compile=true: uncompiled, it is slower than bfloat16")
        every = self.activation_checkpointing_every
        if every is not None and self.activation_checkpointing == "none":
            raise ValueError(
                f"activation_checkpointing_every={every} has no effect with "
                'activation_checkpointing="none"; remove it'
            )
        return self

    @model_validator(mode="after")
    def _batches_fit(self) -> Self:
        if self.micro_batch_size > self.global_batch_size:
            raise ValueError(
                f"micro_batch_size={self.micro_batch_size} exceeds "
                f"global_batch_size={self.global_batch_size}, the sequences of all ranks"
            )
        return self


class OptimizerSection(Section):
    """The optimizer; its learning rate is the peak of the schedule."""

    name: Annotated[
        Literal["adamw", "muon", "sgd"],
        Key(
            values={
                "adamw": "AdamW: two moments for each parameter, decoupled weight decay",
                "muon": "Muon for the matrices inside the blocks, AdamW for everything else",
                "sgd": "SGD with momentum",
            }
        ),
    ] = "adamw"
    """Which optimizer."""
    lr: Annotated[PositiveFloat, Key(PURE, 6e-4)] = 3e-4
    """Peak learning rate; with muon on AdamW's scale as well."""
    weight_decay: Annotated[NonNegativeFloat | None, Key(PURE, 0.01)] = None
    """Weight decay of matrices, not of norms; decoupled, except that sgd adds it to the gradient.
    Default: 0.1, or 0 with sgd."""
    betas: Annotated[
        Annotated[list[Beta], Field(min_length=2, max_length=2)] | None, Key(PURE, [0.9, 0.99])
    ] = None
    """adamw, muon: decay rates of AdamW's two moments; [0.9, 0.95] by default."""
    eps: Annotated[PositiveFloat | None, Key(PURE, 1e-5)] = None
    """adamw, muon: AdamW's epsilon; 1e-8 by default."""
    momentum: Annotated[Beta | None, Key(PURE, 0.9)] = None
    """muon, sgd: decay rate of the momentum; by default 0.95 with muon, 0.9 with sgd."""
    nesterov: bool | None = None
    """muon, sgd: Nesterov momentum; by default true with muon, false with sgd."""

    @model_validator(mode="after")
    def _obeys_what_is_set(self) -> Self:
        unused = {"adamw": ("momentum", "nesterov"), "sgd": ("betas", "eps"), "muon": ()}
        for option in unused[self.name]:
            if getattr(self, option) is not None:
                raise ValueError(f'{option} has no effect with name="{self.name}"; remove it')
        if self.name == "sgd" and self.nesterov and self.momentum == 0:
            raise ValueError("nesterov=true needs a momentum above 0")
        return self


class SchedulerSection(Section):
    """The learning rate as a pure function of the step."""

    name: Annotated[
        Literal["cosine", "linear", "wsd", "constant"],
        Key(
            values={
                "cosine": "from the peak to the end along half a cosine",
                "linear": "from the peak to the end in a straight line",
                "wsd": "stays at the peak, then falls in a straight line over the last decay_steps",
                "constant": "stays at the peak",
            }
        ),
    ] = "cosine"
    """Shape after the warm-up; the end is min_lr_ratio of the peak."""
    warmup_steps: Annotated[NonNegativeInt, Key("steps", 2000)] = 0
    """Steps of linear warm-up from 0 to the peak; a shorter run does not reach it."""
    decay_steps: Annotated[PositiveInt | None, Key("steps", 10_000)] = None
    """wsd: steps of linear decay at the end; a tenth of all by default."""
    min_lr_ratio: Annotated[Fraction, Key("share of the peak", 0.1)] = 0.0
    """Final learning rate as a fraction of the peak (cosine, linear, wsd)."""
    total_steps: Annotated[PositiveInt | None, Key("steps", 100_000)] = None
    """Steps for which the rate is planned; train.max_steps by default. A run of fewer steps then
    has the rates of the longer one."""

    @model_validator(mode="after")
    def _obeys_what_is_set(self) -> Self:
        if self.decay_steps is not None and self.name != "wsd":
            raise ValueError(f'decay_steps has no effect with name="{self.name}"; remove it')
        return self


class DataSection(Section):
    """The tokens: a directory that `kempner prepare` wrote."""

    dataset_path: Annotated[PathText, Key(example="data/books")] = "data/train"
    """Directory with index.json and its token files."""
    document_mask: bool = False
    """Tokens attend only to earlier ones of the same document, not of the whole sequence. Not for a
    model of your own."""
    num_dataloader_workers: Annotated[NonNegativeInt, Key("processes", 2)] = 0
    """Loader processes per rank; 0 reads in the rank itself."""
    num_shards_per_rank: Annotated[PositiveInt | None, Key("files", 64)] = None
    """Most token files that one rank keeps open, divided among its loader workers; by default as
    many as the limit of open files allows."""


class CheckpointSection(Section):
    """Where checkpoints are written, how often, and how many are kept."""

    dir: Annotated[PathText | None, Key(example="/scratch/me/checkpoints")] = None
    """Folder of the checkpoints; checkpoints/ in the run's directory by default."""
    interval: Annotated[PositiveInt, Key("steps", 250)] = 500
    """Steps between checkpoints."""
    async_save: bool = True
    """Write in the background while training continues."""
    in_memory: bool = False
    """Also keep each step in the node's memory, if the state fits: after the death of a process the
    run resumes from the last step, which becomes a checkpoint. Needs memory for three copies of
    what a rank saves; not with the launcher torchrun."""
    buddy: bool = False
    """With in_memory, also keep copies in the memory of another node: after the loss of a node the
    run resumes from the last step that was copied. Needs memory for seven copies in all, and the
    launcher srun."""
    buddy_share: Annotated[float, Field(gt=0, le=1), Key("share of the time", 0.1)] = 0.05
    """Share of the time in which a node may send copies; with the speed of the network it
    determines how many steps lie between two copies."""
    keep_last: Annotated[int, Field(ge=2), Key("checkpoints", 5)] = 3
    """Number of newest checkpoints to keep; at least 2, since the last may be damaged."""
    keep_every: Annotated[PositiveInt | None, Key("steps", 5000)] = None
    """Keep steps that are multiples of this forever; must be a multiple of interval. Off by
    default."""
    keep_damaged: Annotated[NonNegativeInt | None, Key("checkpoints", 1)] = None
    """How many of the newest checkpoints that were damaged and set aside are kept; 3 by default."""
    max_failures: Annotated[PositiveInt, Key("saves", 5)] = 3
    """Saves that may fail in a row before the run ends with exit code 74. If storage is the reason,
    resilience.patience seconds must also have passed since the last successful save."""
    accept_changes: Annotated[
        list[Literal["data", "seed"]],
        Key(
            example=["data"],
            values={"data": "the tokens of data.dataset_path", "seed": "train.seed"},
        ),
    ] = []  # noqa: RUF012 - pydantic copies it
    """What may differ from the checkpoint at a resume. Otherwise other data or another seed is
    refused."""

    @model_validator(mode="after")
    def _intervals_and_buddy_fit(self) -> Self:
        if self.buddy and not self.in_memory:
            raise ValueError("buddy=true needs in_memory=true: a buddy keeps copies of that")
        if self.keep_every is not None and self.keep_every % self.interval:
            raise ValueError(
                f"keep_every={self.keep_every} must be a multiple of interval={self.interval}, "
                "since other steps are not saved"
            )
        return self


class SuperviseSection(Section):
    """The daemon that launches and supervises the ranks."""

    stop_grace: Annotated[PositiveFloat, Key("seconds", 900.0)] = 600.0
    """Seconds that ranks have to commit and exit after a stop was requested; then they are killed.
    A second Ctrl-C within two seconds does not wait for this."""
    crash_grace: Annotated[NonNegativeFloat, Key("seconds", 10.0)] = 5.0
    """Seconds that the other ranks have to exit by themselves after one rank failed."""
    control_interface: Annotated[Text | None, Key(example="ib0")] = None
    """Network interface on which the supervisor of a Slurm job listens to the agents of its nodes;
    by default both the one that the ranks use and the one that node names resolve to."""
    control_ports: Annotated[
        Annotated[str, Field(pattern=PORTS)] | None,
        Key(example="20000-20100", form="two port numbers, first-last"),
    ] = None
    """Range of ports, as in "20000-20100", of which the supervisor of a Slurm job uses one free
    port to listen to the agents of its nodes. Any free port by default."""
    supervisor_timeout: Annotated[
        float, Field(ge=10, allow_inf_nan=False), Key("seconds", 120.0)
    ] = 60.0
    """Seconds without a heartbeat from the supervisor after which ranks checkpoint and exit."""
    lease: Annotated[float, Field(ge=1, allow_inf_nan=False), Key("seconds", 90.0)] = 45.0
    """Seconds without a renewed lease after which a supervisor on another machine counts as dead,
    and a new one may replace it."""
    keep_attempts: Annotated[PositiveInt, Key("attempts", 50)] = 20
    """Attempts whose logs are kept in attempts/; a new one deletes the oldest. Those that GAVE_UP
    points to stay."""
    max_restarts_without_progress: Annotated[NonNegativeInt, Key("restarts", 5)] = 3
    """Restarts in a row without a new checkpoint before kempner gives up. As long as each restart
    commits something new, there is no limit. 0: never restart."""
    spare_nodes: Annotated[NonNegativeInt, Key("nodes", 1)] = 0
    """Nodes of a Slurm job that stay without ranks, to replace lost ones."""
    min_nodes: Annotated[PositiveInt | None, Key("nodes", 7)] = None
    """Smallest number of nodes to continue with when others are lost and no spare one is left. By
    default all are needed: a job that has lost one is requeued, and asks for another."""

    grow: bool = True
    """A run that continues on fewer nodes (min_nodes) uses excluded nodes again as soon as they are
    healthy: its ranks commit, and restart at once on all nodes. Samples and global batch stay the
    same."""
    grow_after: Annotated[PositiveFloat, Key("seconds", 600.0)] = 300.0
    """Seconds for which such a node must be healthy before it is used again; doubled each time that
    it fails afterwards."""

    fork: bool = True
    """Fork the ranks from a process that has imported torch and computes nothing: a restart then
    takes a second instead of ten. If a fork would not be safe, a rank starts as a new process."""
    fork_imports: Annotated[list[Text], Key(example=["torch", "transformers"])] = []  # noqa: RUF012 - pydantic copies it
    """Modules to import before the ranks of a program of your own are forked, such as ["torch"]; by
    default its ranks are not forked. The command must be `python FILE.py` or `python -m MODULE`."""

    @property
    def ports(self) -> range | None:
        if self.control_ports is None:
            return None
        first, last = map(int, self.control_ports.split("-"))
        return range(first, last + 1)

    @model_validator(mode="after")
    def _ports_are_valid(self) -> Self:
        ports = self.ports
        if ports is not None and not (ports and ports[0] > 0 and ports[-1] < 65536):
            raise ValueError(
                f'control_ports="{self.control_ports}" is not a range of ports; '
                'write the first and the last, as in "20000-20100"'
            )
        return self


class MetricsSection(Section):
    """What is recorded during training, and where it goes besides metrics.jsonl."""

    log_interval: Annotated[PositiveInt, Key("steps", 10)] = 1
    """Steps between lines of metrics.jsonl."""
    tensorboard: bool = False
    """The supervisor keeps tensorboard/ in the run's directory up to date."""
    wandb: Annotated[Text | None, Key(example="my-project")] = None
    """A project of Weights & Biases, in which all starts are one run; offline unless WANDB_MODE
    says otherwise."""
    prometheus: Annotated[PathText | None, Key(example="/var/lib/node_exporter/kempner.prom")] = (
        None
    )
    """A file with the last values, for node exporter's textfile collector."""
    opentelemetry: Annotated[
        Annotated[str, Field(pattern=COLLECTOR)] | None,
        Key(example="http://collector:4318", form="URL of http or https, or `env`"),
    ] = None
    """A collector that gets each step by OTLP over HTTP; `env`: the one that
    OTEL_EXPORTER_OTLP_ENDPOINT names. Other OTEL_EXPORTER_OTLP_* variables apply in both cases."""


SetName = Annotated[str, Field(pattern=SET_NAME, max_length=64)]


class HeldOutFolder(NamedTuple):
    """A directory of held-out tokens, and the key that sets it. The set of eval.dataset_path has an
    empty name."""

    key: str
    name: str
    folder: str


class EvalSection(Section):
    """Loss on held-out data."""

    interval: Annotated[PositiveInt | None, Key("steps", 1000)] = None
    """Steps between evaluations; none by default. If set, the last step is always evaluated."""
    dataset_path: Annotated[PathText | None, Key(example="data/held_out")] = None
    """Directory of the held-out tokens, as written by `kempner prepare`."""
    max_batches: Annotated[PositiveInt, Key("batches", 16)] = 8
    """Maximum number of global batches of each set per evaluation."""
    sets: Annotated[
        dict[SetName, PathText] | None,
        Key(example={"code": "data/code"}, form="table of directories by name"),
    ] = None
    """More held-out sets by name; their metrics carry the name."""

    @model_validator(mode="after")
    def _needs_data(self) -> Self:
        if self.interval is not None and self.dataset_path is None and not self.sets:
            raise ValueError("interval needs dataset_path or sets, the held-out tokens")
        return self

    @property
    def held_out(self) -> list[HeldOutFolder]:
        """All sets, in the order in which they are evaluated."""
        found = [HeldOutFolder(f"eval.sets.{n}", n, f) for n, f in (self.sets or {}).items()]
        if self.dataset_path is not None:
            found.insert(0, HeldOutFolder("eval.dataset_path", "", self.dataset_path))
        return found

    @property
    def due(self) -> list[HeldOutFolder]:
        """The sets that a run evaluates; none without an interval."""
        return [] if self.interval is None else self.held_out


class Config(Section):
    """The whole configuration of a run."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    train: TrainSection = TrainSection()
    optimizer: OptimizerSection = OptimizerSection()
    scheduler: SchedulerSection = SchedulerSection()
    data: DataSection = DataSection()
    parallelism: ParallelismSection = ParallelismSection()
    distributed: DistributedSection = DistributedSection()
    checkpoint: CheckpointSection = CheckpointSection()
    resilience: ResilienceSection = ResilienceSection()
    supervise: SuperviseSection = SuperviseSection()
    program: ProgramSection = ProgramSection()
    slurm: SlurmSection = SlurmSection()
    hooks: HooksSection = HooksSection()
    metrics: MetricsSection = MetricsSection()
    profiling: ProfilingSection = ProfilingSection()
    eval: EvalSection = EvalSection()
    adapter: AdapterSection = AdapterSection()
    preferences: PreferencesSection = PreferencesSection()
    integrity: IntegritySection = IntegritySection()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.train.seq_len > self.model.max_seq_len:
            raise ValueError(
                f"train.seq_len={self.train.seq_len} exceeds "
                f"model.max_seq_len={self.model.max_seq_len}"
            )
        if self.model.factory is not None:
            for key in ("activation_checkpointing", "compile", "fp8"):
                if getattr(self.train, key) != TrainSection.model_fields[key].default:
                    raise ValueError(f"train.{key} has no effect with model.factory; remove it")
            if self.data.document_mask:
                raise ValueError("data.document_mask has no effect with model.factory; remove it")
        planned = self.scheduler.total_steps
        if planned is not None and planned < self.train.max_steps:
            raise ValueError(
                f"scheduler.total_steps={planned} is less than "
                f"train.max_steps={self.train.max_steps}"
            )
        degree = self.parallelism.tensor_parallel_degree
        self.adapter.refuse_beside(self.model, self.optimizer.name, self.train.fp8, degree)
        exact = bool(self.train.same_on_any_world)
        self.preferences.refuse_beside(self.adapter, exact)
        self.integrity.refuse_beside(exact, self.parallelism.reduce_gradients)
        return self

    @model_validator(mode="after")
    def _can_be_the_same_on_any_world(self) -> Self:
        if not self.train.same_on_any_world:
            return self
        parallelism = self.parallelism
        impossible = {
            "without train.threads, since another number of threads computes other bits": (
                self.train.threads is None
            ),
            "with parallelism.tensor_parallel_degree above 1, which adds within a row in another "
            "order": parallelism.tensor_parallel_degree > 1,
            'with optimizer.name="muon", whose updates depend on where a shard ends': (
                self.optimizer.name == "muon"
            ),
            "with train.fp8, which was never tried with it": self.train.fp8,
            "with model.factory, whose code may depend on its rank": (
                self.model.factory is not None
            ),
        }
        for why, asked in impossible.items():
            if asked:
                raise ValueError(f"train.same_on_any_world does not work {why}; change one of them")
        return self

    @model_validator(mode="after")
    def _tensor_parallel_is_supported(self) -> Self:
        degree = self.parallelism.tensor_parallel_degree
        unsupported = {
            "model.factory": (self.model.factory is not None, "is replicated and sharded only"),
            'optimizer.name="muon"': (
                self.optimizer.name == "muon",
                "needs whole rows of a matrix",
            ),
            "train.fp8": (self.train.fp8, "was never tried with it"),
        }
        for key, (asked, why) in unsupported.items():
            if asked and degree > 1:
                raise ValueError(
                    f"parallelism.tensor_parallel_degree={degree} does not work with {key}, which "
                    f"{why}; set it to 1, or remove {key}"
                )
        return self
