"""Logs of any program: what failed first is named with its rank and node, or that it is unknown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import tomli

from kempner.insight.triage.first_failure import triage_logs
from kempner.insight.triage.rules import Sure
from kempner.insight.triage.scan import Scan
from kempner.insight.triage.verdict import Verdict, decide

LOGS = Path(__file__).parent / "logs"

PUBLIC = tomli.loads((LOGS / "public" / "index.toml").read_text())
MADE = tomli.loads((LOGS / "made" / "index.toml").read_text())
EXAMS = tomli.loads((LOGS / "exams" / "index.toml").read_text())


def verdict_on(*lines: str) -> Verdict:
    scan = Scan()
    scan.read("log", lines)
    return decide(scan)


@pytest.mark.parametrize(
    ("folder", "name"),
    [*(("public", name) for name in PUBLIC), *(("made", name) for name in MADE)],
)
def test_the_first_failure_is_named(folder: str, name: str) -> None:
    expected = {**PUBLIC, **MADE}[name]
    verdict = triage_logs([LOGS / folder / f"{name}.log"])
    assert (verdict.cause, verdict.rank, verdict.node) == (
        expected["cause"],
        expected.get("rank"),
        expected.get("node"),
    )
    assert verdict.known == (verdict.sure is not Sure.UNKNOWN)
    assert verdict.evidence


@pytest.mark.parametrize("name", EXAMS)
def test_what_examiners_have_made_is_solved(name: str) -> None:
    """Their logs are longer, of more ranks, and full of what comes after the failure."""
    expected = EXAMS[name]
    verdict = triage_logs(sorted((LOGS / "exams" / expected["exam"] / name).iterdir()))
    assert verdict.cause == expected["cause"]
    unknown = verdict.rank is None and expected["rank_may_be_unknown"]
    assert unknown or verdict.rank in expected["ranks"]
    assert verdict.node == expected.get("node", verdict.node)


def test_there_are_logs_of_many_threads() -> None:
    addresses = {entry["address"] for entry in PUBLIC.values()}
    assert len(addresses) >= 30
    assert all(address.startswith("https://") for address in addresses)
    for folder, index in (("public", PUBLIC), ("made", MADE)):
        assert {path.stem for path in (LOGS / folder).glob("*.log")} == set(index)


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_of_several_logs_the_earliest_failure_counts(tmp_path: Path) -> None:
    later = write(tmp_path / "a.log", "[rank0]: 2026-01-01 10:00:09,5 KeyError: 'later'")
    first = write(tmp_path / "b.log", "[rank1]: 2026-01-01 10:00:03,5 ValueError: first")
    verdict = triage_logs([later, first])
    assert (verdict.rank, verdict.first_error.raised) == (1, "ValueError: first")


def test_the_exception_has_the_user_s_own_line() -> None:
    verdict = verdict_on(
        "[rank2]: Traceback (most recent call last):",
        '[rank2]:   File "/home/u/train.py", line 31, in step',
        "[rank2]:     loss = model(batch)",
        '[rank2]:   File "/opt/site-packages/torch/nn/modules/module.py", line 9, in f',
        "[rank2]:     return g()",
        "[rank2]: RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x3 and 4x3)",
    )
    assert (verdict.cause, verdict.rank) == ("exception", 2)
    assert verdict.first_error.frame == "/home/u/train.py:31 in step"


def test_tracebacks_of_ranks_that_write_at_once_are_told_apart() -> None:
    verdict = verdict_on(
        "[rank1]: Traceback (most recent call last):",
        "[rank0]: Traceback (most recent call last):",
        '[rank1]:   File "/home/u/a.py", line 1, in one',
        '[rank0]:   File "/home/u/b.py", line 2, in two',
        "[rank1]:     one()",
        "[rank0]:     two()",
        "[rank1]: KeyError: 'one'",
        "[rank0]: ValueError: two",
    )
    assert (verdict.rank, verdict.first_error.raised) == (1, "KeyError: 'one'")
    assert verdict.first_error.frame == "/home/u/a.py:1 in one"


@pytest.mark.parametrize(
    ("steps", "cause"),
    [(3, "cuda_out_of_memory"), (30, "time_limit")],
)
def test_what_the_training_survives_is_no_failure(steps: int, cause: str) -> None:
    verdict = verdict_on(
        "step 1 loss 5.0",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        *(f"step {step} loss 5.0" for step in range(2, steps)),
        "slurmstepd: error: *** STEP 5.0 ON n1 CANCELLED AT 2026-01-01T04:00:00 DUE TO TIME LIMIT",
    )
    assert verdict.cause == cause


def test_the_last_of_several_launches_in_one_log_counts_however_many_failed() -> None:
    launches = [
        line
        for launch in range(100)
        for line in (*(f"step {launch * 10 + n}" for n in range(10)), "ValueError: old")
    ]
    verdict = verdict_on(*launches, *(f"step {n}" for n in range(2000, 2010)), "KeyError: 'new'")
    assert verdict.first_error.raised == "KeyError: 'new'"


NCCL = "{node}:{pid}:{pid} [0] NCCL INFO "


def test_ranks_that_talk_over_sockets_are_named() -> None:
    lines = [
        NCCL.format(node=f"n{rank // 2}", pid=100 + rank)
        + f"comm 0x1 rank {rank} nranks 4 cudaDev {rank % 2} busId 1000 - Init COMPLETE"
        for rank in range(4)
    ]
    nets = {0: "IB", 1: "IB", 2: "IB", 3: "Socket"}
    using = [
        NCCL.format(node=f"n{rank // 2}", pid=100 + rank) + f"Using network {net}"
        for rank, net in nets.items()
    ]
    channel = NCCL.format(node="n1", pid=102)
    channel += "Channel 00/0 : 2[0] -> 0[0] [send] via NET/Socket/0"
    verdict = verdict_on(*using, *lines, channel)
    assert not verdict.known
    (note,) = verdict.notes
    assert "NET/Socket" in note
    assert "ranks 2-3 of 4" in note
    assert verdict_on(*lines, *using[:2]).notes == ()


@pytest.mark.parametrize("milliseconds", [1, 600000, 1800000])
def test_a_missing_nccl_id_is_explained_by_its_likely_reasons(milliseconds: int) -> None:
    waits = (
        "[rank1]: torch.distributed.DistBackendError: [1] is setting up NCCL communicator and "
        "retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') "
        f"got error: wait timeout after {milliseconds}ms, keys: /default_pg/0//cuda//0"
    )
    verdict = verdict_on(waits)
    assert (verdict.cause, verdict.rank) == ("nccl_init_timeout", 0)
    reasons = ["busy", "ImportError", "out of memory", "network"]
    assert sorted(reasons, key=verdict.do.index) == reasons
    explained = verdict_on("[rank0]: ImportError: cannot import name 'x'", waits)
    assert (explained.cause, explained.rank) == ("import_error", 0)


def test_noise_does_not_hide_a_node_failure() -> None:
    verdict = verdict_on(
        *["/x/y.py:3: UserWarning: something failed with an error", "  warnings.warn("] * 500,
        "srun: error: Node failure on node17",
        "[W AllocatorConfig.cpp:28] Warning: expandable_segments not supported (operator())",
    )
    assert (verdict.cause, verdict.node, verdict.sure) == ("node_failure", "node17", Sure.CERTAIN)


def test_what_no_rule_knows_is_shown_and_not_guessed() -> None:
    verdict = verdict_on("starting", "FATAL: frob table exhausted at slot 17", "bye")
    assert not verdict.known
    assert (verdict.rank, verdict.node) == (None, None)
    assert [evidence.text for evidence in verdict.evidence] == [
        "FATAL: frob table exhausted at slot 17"
    ]


def endless(lines: int) -> Iterator[str]:
    for number in range(lines):
        yield f"[rank{number % 8}]: step {number} loss 2.0 " + "x" * 200
        if number % 7 == 0:
            yield f"[rank3]: RuntimeError: CUDA out of memory. Tried to allocate {number} MiB"


def test_a_long_log_needs_no_more_memory_than_a_short_one() -> None:
    def kept(texts: Iterable[str]) -> int:
        scan = Scan()
        scan.read("log", texts)
        assert decide(scan).cause == "cuda_out_of_memory"
        return len(list(scan.findings)) + len(scan.suspects.first)

    assert kept(endless(40_000)) <= kept(endless(4_000)) < 100


@pytest.mark.parametrize(
    ("second", "steps", "cause"),
    [
        ("docker0:172.17.0.1", 0, "wrong_interface"),
        ("ib0:10.0.0.1", 0, "wrong_interface"),  # the same address on both
        ("ib0:10.0.0.2", 0, "nccl_error"),
        ("docker0:172.17.0.1", 30, "nccl_error"),  # it has worked for a while
    ],
)
def test_a_bridge_leads_to_no_other_node(second: str, steps: int, cause: str) -> None:
    first = "docker0:172.17.0.1" if "docker" in second else "ib0:10.0.0.1"
    verdict = verdict_on(
        *(
            f"{node}:7:7 [0] NCCL INFO Bootstrap : Using {used}<0>"
            for node, used in (("n1", first), ("n2", second))
        ),
        *(f"step {step} loss 5.0" for step in range(steps)),
        "[rank3]: torch.distributed.DistBackendError: NCCL error, unhandled system error",
    )
    assert verdict.cause == cause


def test_what_a_worker_has_raised_counts_and_not_that_it_did() -> None:
    lines = [
        "Traceback (most recent call last):",
        '  File "/home/u/train.py", line 3, in <module>',
        "{kind}: Caught {kind} in {where}.",
        "Original Traceback (most recent call last):",
        '  File "/home/u/data.py", line 7, in load',
        "{said}",
    ]
    for where in ("DataLoader worker process 5", "pin memory thread for device 0", "replica 1"):
        stale = "OSError: [Errno 116] Stale file handle: '/nfs/x'"
        words = {"kind": "OSError", "where": where, "said": stale}
        assert verdict_on(*(line.format(**words) for line in lines)).cause == "stale_file_handle"
    words = {"kind": "KeyError", "where": "DataLoader worker process 0", "said": "KeyError: 'de'"}
    verdict = verdict_on(*(line.format(**words) for line in lines))
    assert (verdict.first_error.raised, verdict.first_error.frame) == (
        "KeyError: 'de'",
        "/home/u/data.py:7 in load",
    )


def test_a_local_rank_is_no_rank_where_there_are_several_nodes() -> None:
    error = "ImportError: x.so: undefined symbol: y"
    lines = [f"[n{n % 2 + 1}] [default{n // 2}]:starting" for n in range(4)]
    verdict = verdict_on(*lines, f"[n2] [default1]:{error}")
    assert (verdict.cause, verdict.rank, verdict.node) == ("binary_mismatch", None, "n2")
    told = [f"[n2] [default1]:[rank3]: world_size=4, {n}" for n in range(2)]
    verdict = verdict_on(*lines, *told, f"[n2] [default1]:{error}")
    assert (verdict.rank, verdict.node) == (3, "n2")


def test_a_task_of_srun_is_no_rank_where_torchrun_starts_them() -> None:
    end = "srun: error: n2: task 1: Exited with exit code 1"
    assert verdict_on(end).rank == 1
    agent = "W0101 00:00:00 torch/distributed/elastic/agent/server/api.py:900] Sending SIGTERM"
    assert (verdict_on(agent, end).rank, verdict_on(agent, end).node) == (None, "n2")
