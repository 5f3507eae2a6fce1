"""Signs by example: what each cause's rules know, and what looks alike and is something else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kempner.insight.triage.rules import Sure
from kempner.insight.triage.scan import Scan
from kempner.insight.triage.verdict import Verdict, decide

EXAMPLES = {
    "damaged_file": [
        "PIL.UnidentifiedImageError: cannot identify image file '/data/a.jpg'",
        "OSError: broken data stream when reading image file",
        "gzip.BadGzipFile: Not a gzipped file (b'<h')",
        "EOFError: Compressed file ended before the end-of-stream marker was reached",
        "zlib.error: Error -3 while decompressing data: incorrect header check",
        "pyarrow.lib.ArrowInvalid: Parquet magic bytes not found in footer.",
        "tarfile.ReadError: unexpected end of data",
        "OSError: Unable to open file (truncated file: eof = 96, sblock->base_addr = 0)",
    ],
    "extension_build": [
        "AssertionError: CUDA_HOME does not exist, unable to compile CUDA op(s)",
        "OSError: CUDA_HOME environment variable is not set. Please set it to your install root.",
        "RuntimeError: Error building extension 'fused_adam'",
        "RuntimeError: Ninja is required to load C++ extensions",
        "RuntimeError: The detected CUDA version (12.4) mismatches the version that was used to "
        "compile PyTorch (11.8).",
    ],
    "binary_mismatch": [
        "ImportError: /opt/x.so: invalid ELF header",
        "AssertionError: Torch not compiled with CUDA enabled",
        "ValueError: numpy.dtype size changed, may indicate binary incompatibility. Expected 96",
        "RuntimeError: Numpy is not available",
    ],
    "version_mismatch": [
        "Exception: data did not match any variant of untagged enum ModelWrapper at line 9",
        "ValueError: The checkpoint you are trying to load has model type `qwen9` but Transformers "
        "does not recognize this architecture.",
    ],
    "usage": [
        "ValueError: Error initializing torch.distributed using env:// rendezvous: environment "
        "variable RANK expected, but not set",
        "KeyError: 'LOCAL_RANK'",
    ],
    "checkpoint_mismatch": [
        "ValueError: Size mismatch between saved torch.Size([8]) and current: torch.Size([9])",
        "RuntimeError: Missing key in checkpoint state_dict: model.norm.weight.",
    ],
    "cuda_out_of_memory": [
        "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to "
        "allocate 34359738368 bytes."
    ],
    "exception": [
        "KeyError: 'RANKING'",
        "ValueError: image size (3, 4) is not square",
        "RuntimeError: the caption could not be compiled",
        "ValueError: unknown variant 'b'",
        "TypeError: unsupported operand type(s) for +: 'int' and 'str'",
    ],
}


def verdict_on(*lines: str) -> Verdict:
    scan = Scan()
    scan.read("log", lines)
    return decide(scan)


def raised(what: str, *way: tuple[str, str], who: str = "[rank1]: ") -> list[str]:
    """A traceback through these files and functions."""
    frames = [f'  File "{file}", line 9, in {name}' for file, name in way]
    return [f"{who}{text}" for text in ["Traceback (most recent call last):", *frames, what]]


OWN, LIBRARY = ("/home/u/train.py", "main"), ("/opt/site-packages/x/y.py", "call")


@pytest.mark.parametrize(
    ("cause", "said"), [(cause, said) for cause, all_ in EXAMPLES.items() for said in all_]
)
def test_what_is_raised_is_told_from_what_looks_alike(cause: str, said: str) -> None:
    verdict = verdict_on(*raised(said, OWN, LIBRARY))
    assert (verdict.cause, verdict.rank) == (cause, 1)


SIZES = "RuntimeError: The size of tensor a (9) must match the size of tensor b (8)"


@pytest.mark.parametrize(
    ("way", "cause"),
    [
        ([OWN, ("/opt/site-packages/torch/a.py", "set_model_state_dict"), LIBRARY], True),
        ([OWN, ("/home/u/io.py", "load_checkpoint")], True),
        ([OWN, ("/opt/site-packages/torch/a.py", "forward"), LIBRARY], False),
        ([("/home/u/a.py", "load_state_dict"), *[LIBRARY] * 9], False),  # far away
        ([("/home/u/a.py", "load_images")], False),
    ],
)
def test_sizes_that_differ_while_a_checkpoint_is_loaded_are_those_of_the_checkpoint(
    way: Sequence[tuple[str, str]], cause: bool
) -> None:
    verdict = verdict_on(*raised(SIZES, *way))
    assert verdict.cause == ("checkpoint_mismatch" if cause else "exception")
    assert verdict.sure is not Sure.CERTAIN or not cause


def test_an_exception_without_a_rule_is_certain_only_where_the_program_itself_raised_it() -> None:
    said = "RuntimeError: frobnication failed"
    assert verdict_on(*raised(said, LIBRARY, OWN)).sure is Sure.CERTAIN
    assert verdict_on(*raised(said, OWN, LIBRARY)).sure is Sure.LIKELY
    assert verdict_on(f"[rank1]: {said}").sure is Sure.LIKELY


@pytest.mark.parametrize(
    ("tasks", "highest", "rank"),
    [
        (["n2: task 1", "n1: task 0"], 6, None),  # a launcher on each node
        (["n2: task 1", "n1: task 0"], 1, 1),
        (["n1: task 1", "n2: task 8"], 15, 1),  # eight of them on each node
    ],
)
def test_tasks_of_srun_that_launch_several_ranks_each_are_no_ranks(
    tasks: Sequence[str], highest: int, rank: int | None
) -> None:
    spoke = [f"[rank{highest}]: starting, no error", "[rank0]: starting, no error"]
    ends = [f"srun: error: {task}: Segmentation fault" for task in tasks]
    assert verdict_on(*spoke, *ends).rank == rank


def test_a_gpu_that_the_kernel_gives_up_is_that_of_the_rank_that_lost_it() -> None:
    lost = "NVRM: Xid (PCI:0000:03:00): 79, GPU has fallen off the bus."
    failed = "RuntimeError: CUDA error: unspecified launch failure"
    one = raised(failed, OWN, who="rank 2: ")
    assert (verdict_on(*one, lost).cause, verdict_on(*one, lost).rank) == ("gpu_lost", 2)
    two = raised(failed, OWN, who="rank 3: ")
    assert verdict_on(*one, *two, lost).rank is None


def test_the_task_that_sends_no_heartbeat_is_the_one_that_failed() -> None:
    said = "E coordination_service.cc:954] /job:jax_worker/replica:0/task:{0} has been set to ERROR"
    verdict = verdict_on("I1115 trainer.py:501] step 9", said.format(37))
    assert (verdict.cause, verdict.rank, verdict.sure) == ("peer_lost", 37, Sure.LIKELY)


@pytest.mark.parametrize(("also", "rank"), [((0, 1), None), ((1,), 1)])
def test_where_an_import_fails_on_all_ranks_none_is_first(
    also: Sequence[int], rank: int | None
) -> None:
    said = "ImportError: /opt/x.so: undefined symbol: _ZN3c105ErrorC2"
    host = "gpu14: "  # a node's name that looks like a GPU's number
    start = [f"{host}[rank{rank}]: starting, no error" for rank in (0, 1)]
    lines = [line for rank in also for line in raised(said, OWN, who=f"{host}[rank{rank}]: ")]
    verdict = verdict_on(*start, *lines)
    assert (verdict.cause, verdict.rank, verdict.node) == ("binary_mismatch", rank, "gpu14")
    assert verdict.where.ranks == tuple(also)


@pytest.mark.parametrize(
    ("ring", "rank"),
    [
        ("Channel 00/02 :    1   0   3   2", 1),  # of all four ranks
        ("Channel 00/02 :    1   0", None),  # of a group of two
        ("Channel 00 : 1[1000] -> 0[3000] via P2P/IPC", None),
    ],
)
def test_a_process_is_the_rank_with_which_its_ring_begins(ring: str, rank: int | None) -> None:
    verdict = verdict_on(
        "n1:70:71 [0] NCCL INFO comm 0xa0 rank 3 nranks 4 cudaDev 0 - Init COMPLETE",
        f"n1:61:62 [0] NCCL INFO {ring}",
        "n1:61:62 [0] misc/ibvwrap.cc:280 NCCL WARN Call to ibv_create_qp failed",
    )
    assert (verdict.cause, verdict.rank, verdict.node) == ("infiniband", rank, "n1")


def test_a_refused_connection_leads_to_the_node_that_refused_it() -> None:
    gloo = "[/b/gloo/transport/tcp/pair.cc:799] connect [10.0.0.7]:13195: Connection refused"
    verdict = verdict_on(*raised(f"RuntimeError: {gloo}", OWN))
    assert (verdict.cause, verdict.rank, verdict.node) == ("unreachable", None, "10.0.0.7")
    both = verdict_on(*raised(f"RuntimeError: {gloo}", OWN), *raised("KeyError: 'a'", OWN, who=""))
    assert both.cause == "exception"
