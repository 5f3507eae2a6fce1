"""Logs that mislead: what is got over beside what ends the job, in many programs' words."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kempner.insight.triage.rules import Sure
from kempner.insight.triage.scan import Scan
from kempner.insight.triage.verdict import Verdict, decide


def verdict_on(lines: Sequence[str]) -> Verdict:
    scan = Scan()
    scan.read("log", lines)
    return decide(scan)


def raised(who: str, what: str, file: str = "/home/u/train.py") -> list[str]:
    lines = ["Traceback (most recent call last):", f'  File "{file}", line 9, in main', "    f()"]
    return [f"{who}{line}" for line in [*lines, what]]


def torchrun(host: str, *ends: tuple[int, int, int]) -> list[str]:
    """The block of torchrun for `(rank, local rank, exit code)`; the last one is its root cause."""
    lines = ["torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ", "Failures:"]
    for place, (rank, local, status) in enumerate(ends, start=1):
        if place == len(ends):
            lines.append("Root Cause (first observed failure):")
        lines += [
            f"[{place}]:",
            "  time      : 2026-01-01_10:00:00",
            f"  host      : {host}",
            f"  rank      : {rank} (local_rank: {local})",
            f"  exitcode  : {status} (pid: {900 + rank})",
            "  error_file: <N/A>",
        ]
    return lines


ABORT = (
    "[rank{0}]:[E101 10:00:00.1 ProcessGroupNCCL.cpp:1515] [PG 0 (default_pg) Rank {0}] Process "
    "group watchdog thread terminated with exception: NCCL error: remote process exited"
)
EIO = "OSError: [Errno 5] Input/output error: '/data/7.tar'"
STALE = "OSError: [Errno 116] Stale file handle: '/data/9.tar'"
PREEMPTED = (
    "slurmstepd: error: *** JOB 5 ON n1 CANCELLED AT 2026-01-01T10:00:02 DUE TO PREEMPTION ***"
)


@pytest.mark.parametrize(
    "before",
    [
        f"[rank2]: WARNING {EIO}, retry 1 of 3",
        f"[rank2]: {EIO} -- attempt 1/4, sleeping 2 s",
        f"[rank2]: ERROR reading failed ({EIO}); retrying in 5 s",
        f"[rank2]: 2026-01-01 10:00:00,1 - loader - INFO - {EIO}, falling back to /mirror",
        f"[rank2]: webdataset: {EIO} ignored, next shard",
        f"[rank2]: E0101 10:00:00.1 7 reader.cc:9] {EIO}: will retry",
        f"[rank2]: {EIO} [skipping sample 17]",
        f"[rank2]: (try 2 out of 5) {EIO}",
    ],
)
def test_what_is_tried_again_is_no_failure_whatever_words_say_so(before: str) -> None:
    assert not verdict_on([before, "[rank2]: reopened"]).known
    verdict = verdict_on([before, "[rank2]: reopened", *raised("[rank9]: ", STALE)])
    assert (verdict.cause, verdict.rank) == ("stale_file_handle", 9)


@pytest.mark.parametrize(
    "last",
    [
        f"[rank2]: ERROR {EIO}, giving up after 3 attempts",
        f"[rank2]: {EIO} -- attempt 4/4",
        f"[rank2]: CRITICAL {EIO}: retries exhausted",
        f"[rank2]: {EIO}: cannot continue, aborting",
        f"[rank2]: RuntimeError: skipping is off, not retrying: {EIO}",
    ],
)
def test_the_same_line_is_fatal_where_it_says_that_nothing_more_is_tried(last: str) -> None:
    retried = f"[rank5]: {STALE} -- attempt 1/4"
    verdict = verdict_on([retried, last])
    assert (verdict.cause, verdict.rank) == ("storage_error", 2)


@pytest.mark.parametrize("above", [True, False])
def test_a_traceback_that_a_logger_shows_of_what_is_tried_again_is_none(above: bool) -> None:
    says = ["[rank1]: WARNING: shard 7 failed, retrying in 5 s"]
    shown = raised("[rank1]: ", EIO)
    retried = says + shown if above else shown + says
    assert not verdict_on(retried).known
    verdict = verdict_on([*retried, *raised("[rank3]: ", "KeyError: 'x'")])
    assert (verdict.cause, verdict.rank) == ("exception", 3)


def test_a_warning_of_another_rank_does_not_take_a_fatal_traceback_back() -> None:
    skipped = "[rank0]: WARNING sample 3 failed, skipping it"
    verdict = verdict_on([skipped, *raised("[rank1]: ", STALE), skipped])
    assert (verdict.cause, verdict.rank) == ("stale_file_handle", 1)


@pytest.mark.parametrize(
    "step",
    [
        "it={0} clip_loss=1.5",
        "upd={0} ret=4.0",
        "vjepa: [  {0}] loss 0.34 mem: 4",
        "update {0} | ppl 12",
        "Training:  5%|█ | {0}/900 [00:12<00:24, 1.3it/s]",
        "<20:13:25> it {0} csi 0.3",
        "batch {0} done",
    ],
)
def test_what_the_training_survives_is_no_failure_however_it_counts(step: str) -> None:
    oom = "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    steps = [step.format(n) for n in range(100, 112)]
    assert not verdict_on([*steps, oom, *steps, *(step.format(n) for n in range(200, 212))]).known
    assert verdict_on([*steps, oom]).cause == "cuda_out_of_memory"


@pytest.mark.parametrize(
    "told",
    [
        "[W 10:00:01] trainer: got signal 15",
        "Received SIGTERM, saving a checkpoint",
        "WARNING: caught signal SIGUSR1: time to leave",
        "signal handler called with signal 10",
        "SIGTERM received on n1",
    ],
)
@pytest.mark.parametrize("end", ["EOFError", "RuntimeError: pool is closed", "BrokenPipeError"])
def test_what_fails_after_the_signal_is_not_why_the_job_was_preempted(told: str, end: str) -> None:
    verdict = verdict_on([f"3: {told}", *raised("3: ", end), PREEMPTED])
    assert (verdict.cause, verdict.rank) == ("preemption", None)


def test_what_failed_before_the_preemption_was_told_is_the_cause() -> None:
    told = "3: got signal 15"
    verdict = verdict_on([*raised("3: ", "KeyError: 'x'"), told, PREEMPTED])
    assert (verdict.cause, verdict.rank) == ("exception", 3)


def test_clocks_tell_that_a_failure_came_after_the_cancel_that_is_printed_below() -> None:
    late = raised("[2026-01-01 10:00:03,5] ", "RuntimeError: queue is closed")
    assert verdict_on([*late, PREEMPTED]).cause == "preemption"
    early = raised("[2026-01-01 09:40:03,5] ", "RuntimeError: queue is closed")
    assert verdict_on([*early, PREEMPTED]).cause == "exception"


@pytest.mark.parametrize("busy", [0, 3])
def test_a_port_in_use_is_of_the_rank_that_could_not_bind(busy: int) -> None:
    lines: list[str] = []
    for local in range(1, 3):
        lines += raised(f"[default{local}]:", "torch.distributed.DistNetworkError: got 0 bytes")
    lines += raised(
        f"[default{busy}]:",
        "RuntimeError: The server socket has failed to bind: EADDRINUSE, address already in use",
    )
    verdict = verdict_on([*lines, *torchrun("n7", (6, 2, 1), (5, 1, 1))])
    assert (verdict.cause, verdict.rank, verdict.node) == ("port_in_use", 4 + busy, "n7")


def test_a_dashboard_without_its_port_is_no_failure() -> None:
    taken = "WARNING exporter: [Errno 98] Address already in use, metrics disabled"
    verdict = verdict_on([taken, *raised("[rank2]: ", "ValueError: bad batch")])
    assert (verdict.cause, verdict.rank) == ("exception", 2)


@pytest.mark.parametrize(
    ("said", "status", "cause"),
    [
        ("Fatal Python error: Segmentation fault", -11, "segfault"),
        ("Fatal Python error: Bus error", -7, "bus_error"),
        ("Fatal Python error: Illegal instruction", -4, "illegal_instruction"),
    ],
)
@pytest.mark.parametrize("culprit", [1, 2])
def test_a_crash_is_of_who_ended_so_and_not_of_who_aborted_for_it(
    said: str, status: int, cause: str, culprit: int
) -> None:
    others = [rank for rank in range(4) if rank != culprit]
    lines = [said, "Thread 0x1 (most recent call first):", *map(ABORT.format, others)]
    ends = [(culprit, culprit, status), *((rank, rank, -6) for rank in reversed(others))]
    verdict = verdict_on([*lines, *torchrun("n1", *ends)])
    assert (verdict.cause, verdict.rank) == (cause, culprit)


ASSERTED = (
    "TensorCompare.cu:106: kernel: block: [0,0,0], thread: [0,0,0] Assertion `p >= 0` failed."
)


@pytest.mark.parametrize(
    "form", ["step {0} loss: {1}", "Epoch 2: 5%| | {0}/48 [00:1<00:2] train/loss={1}", "loss {1}"]
)
@pytest.mark.parametrize(
    ("values", "cause"),
    [
        (["0.5", "nan", "nan", "nan"], "loss_not_finite"),
        (["0.5", "inf", "nan", "nan"], "loss_not_finite"),
        (["0.5", "nan", "0.4", "0.4"], "device_assert"),
        (["0.5", "0.5", "0.4", "nan"], "device_assert"),
    ],
)
def test_a_loss_that_stays_no_number_explains_what_the_kernels_then_find(
    form: str, values: list[str], cause: str
) -> None:
    steps = [form.format(n, value) for n, value in enumerate(values)]
    crash = raised("[rank2]: ", "RuntimeError: CUDA error: device-side assert triggered")
    verdict = verdict_on([*steps, ASSERTED, *crash])
    assert verdict.cause == cause
    assert (verdict.rank, verdict.sure) == (
        (None, Sure.LIKELY) if cause == "loss_not_finite" else (2, Sure.CERTAIN)
    )


def test_a_loss_that_is_no_number_does_not_explain_what_has_nothing_to_do_with_it() -> None:
    steps = [f"step {n} loss: nan" for n in range(9)]
    verdict = verdict_on([*steps, *raised("[rank1]: ", STALE)])
    assert verdict.cause == "stale_file_handle"
    assert any("no finite number since log:1" in note for note in verdict.notes)
    best = [f"step {n} best loss: inf, loss: 0.4" for n in range(9)]
    assert verdict_on([*best, ASSERTED]).cause == "device_assert"


@pytest.mark.parametrize(
    "said",
    [
        "CUDAMismatchException: Installed CUDA version 11.8 does not match the version of torch",
        "RuntimeError: The detected CUDA version (11.8) mismatches the version of PyTorch (12.1)",
        "RuntimeError: torch and torchvision were compiled with different CUDA major versions",
        "AssertionError: torch versions differ: rank 0 has 2.4.0, rank 8 has 2.3.1",
        "RuntimeError: NCCL version mismatch: 2.20.5 and 2.18.1",
    ],
)
def test_versions_that_do_not_fit_are_told_in_many_words(said: str) -> None:
    after = raised("n2: ", "AttributeError: 'Adam' object has no attribute 'op'")
    verdict = verdict_on([*raised("n1: ", said), *after, *raised("n2: ", "KeyError: 1")])
    assert (verdict.cause, verdict.node) == ("version_mismatch", "n1")
    remark = "Installed CUDA version 12.3 does not match the version of torch, but accepting it"
    assert verdict_on([f"n1: {remark}", "n1: step 1"]).cause == "unknown"


@pytest.mark.parametrize("last", ["0: eval 17", "0: <20:25:57> ev", "[rank0]: step 5"])
def test_a_log_that_stops_in_the_middle_names_no_cause(last: str) -> None:
    retried = [f"2: rank 2: {EIO} -- attempt {n}/4, sleeping 2 s" for n in (1, 2)]
    oom = "5: rank 5: torch.OutOfMemoryError caught in the preview, retrying with 16"
    verdict = verdict_on([*retried, oom, *(f"0: eval {n}/9" for n in range(9)), last])
    assert (verdict.cause, verdict.rank, verdict.sure) == ("unknown", None, Sure.UNKNOWN)
    assert any("Input/output" in evidence.text for evidence in verdict.evidence)


def test_what_a_line_mentions_and_nothing_comes_of_is_not_told_as_the_cause() -> None:
    mentioned = "[rank1]: reader: No space left on device on /tmp"
    quiet = [f"[rank0]: shard {n} read" for n in range(80)]
    assert not verdict_on([mentioned, *quiet]).known
    assert verdict_on([*quiet, mentioned]).cause == "disk_full"
    ended = verdict_on([mentioned, *quiet, "srun: error: n1: task 1: Exited with exit code 1"])
    assert (ended.cause, ended.rank) == ("disk_full", 1)


def test_two_ranks_that_fail_of_different_things_at_once_make_it_less_sure() -> None:
    one, two = raised("[rank1]: ", STALE), raised("[rank2]: ", "KeyError: 'x'")
    assert verdict_on([*one, *two]).sure is Sure.LIKELY
    assert verdict_on(one).sure is Sure.CERTAIN


def test_a_bridge_on_all_nodes_is_no_single_rank_s_fault() -> None:
    using = [
        f"{n}: n{n}:7{n}:7{n} [0] NCCL INFO Bootstrap : Using docker0:172.17.0.1<0>"
        for n in range(4)
    ]
    failed = [
        line
        for rank in (2, 1, 3)
        for line in raised(f"{rank}: ", "DistBackendError: NCCL error, unhandled system error")
    ]
    ends = [f"srun: error: n{n}: task {n}: Exited with exit code 1" for n in (2, 1, 3)]
    verdict = verdict_on([*using, *failed, *ends])
    assert (verdict.cause, verdict.rank, verdict.node) == ("wrong_interface", None, None)


def test_a_file_that_is_missing_is_told_from_one_that_has_a_substitute() -> None:
    mild = "INFO stage: [Errno 2] No such file or directory: '/x.gz' -- falling back to /x"
    fatal = raised("[default0]:", 'OSError: Not found: "/b.model": No such file or directory')
    verdict = verdict_on([f"[default1]:{mild}", *fatal, *torchrun("n2", (8, 0, 1))])
    assert (verdict.cause, verdict.rank, verdict.node) == ("missing_file", 8, "n2")
    assert "b.model" in verdict.first_error.raised


EXITED = "srun: error: n2: task 4: Exited with exit code 1"
BARRIER = "RuntimeError: worker 3 is not responding"


@pytest.mark.parametrize(
    ("lines", "cause", "rank", "sure"),
    [
        # The last attempt looks as what a logger shows of an earlier one, but the job ends.
        (
            ["[rank4]: read failed, retrying (2/3)", *raised("[rank4]: ", EIO), EXITED],
            *("storage_error", 4, Sure.LIKELY),
        ),
        # Who lost another may say so in words of its own, as an exception.
        (
            [*raised("[rank0]: ", BARRIER), *torchrun("n1", (0, 0, 1), (3, 3, -9))],
            *("killed", 3, Sure.LIKELY),
        ),
        (
            [
                *raised("[rank0]: ", "TimeoutError: barrier"),
                "mpirun noticed that process rank 2 with PID 12 on node n3 exited on signal 9",
            ],
            *("killed", 2, Sure.LIKELY),
        ),
        (
            ["mp.spawn.ProcessExitedException: process 1 terminated with signal SIGSEGV"],
            *("segfault", 1, Sure.CERTAIN),
        ),
        (raised("[rank0]: ", BARRIER), "exception", 0, Sure.LIKELY),
        # A crash of one rank beside an exception of another.
        (
            [*raised("[rank0]: ", "KeyError: 'x'"), *torchrun("n1", (0, 0, 1), (3, 3, -11))],
            *("exception", 0, Sure.LIKELY),
        ),
        # Other programs' logs say their level in their own way.
        (
            [
                '{"level":"warning","msg":"No space left on device"}',
                *raised("[rank1]: ", "KeyError: 1"),
            ],
            *("exception", 1, Sure.CERTAIN),
        ),
        (
            ['level=warn msg="No space left on device"', *raised("[rank1]: ", "KeyError: 1")],
            *("exception", 1, Sure.CERTAIN),
        ),
        # The kernel does not say of which rank the process was that it took.
        (
            [
                *raised(
                    "[rank2]: ",
                    "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.",
                ),
                "slurmstepd: error: Detected 1 oom_kill event in StepId=5.0.",
            ],
            *("host_out_of_memory", 2, Sure.CERTAIN),
        ),
        (
            [
                "Exception ignored in: <function X.__del__>",
                *raised("", EIO),
                *raised("[rank1]: ", STALE),
            ],
            *("stale_file_handle", 1, Sure.CERTAIN),
        ),
    ],
)
def test_how_sure_it_is_follows_from_what_it_rests_on(
    lines: list[str], cause: str, rank: int, sure: Sure
) -> None:
    verdict = verdict_on(lines)
    assert (verdict.cause, verdict.rank, verdict.sure) == (cause, rank, sure)


@pytest.mark.parametrize(
    ("said", "root", "culprit"),
    [
        ("Fatal Python error: Segmentation fault", 1, -11),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", -6, 1),
    ],
)
def test_torchrun_s_root_cause_is_not_believed_against_how_processes_ended(
    said: str, root: int, culprit: int
) -> None:
    lines = [said, ABORT.format(0), *torchrun("n1", (3, 3, culprit), (0, 0, root))]
    assert verdict_on(lines).rank == 3
    believed = [said, *torchrun("n1", (3, 3, culprit), (2, 2, culprit))]
    assert verdict_on(believed).rank == 2


def test_an_inherited_binding_is_no_fault_of_the_node_that_it_fails_on() -> None:
    verdict = verdict_on(
        [
            "srun: error: CPU binding outside of job step allocation, allocated CPUs are: 0x3.",
            "srun: error: Task launch for StepId=5.0 failed on node n7: Unable to satisfy cpu bind "
            "request",
            "srun: error: Application launch failed: Unable to satisfy cpu bind request",
            "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
        ]
    )
    assert (verdict.cause, verdict.node, verdict.rank) == ("cpu_binding", None, None)


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (
            "_pickle.UnpicklingError: Weights only load failed. This file can still be loaded, to "
            "do so you have two options, do those steps only if you trust the source of the "
            "checkpoint. ",
            "weights_only",
        ),
        ("_pickle.UnpicklingError: pickle data was truncated", "damaged_file"),
    ],
)
def test_a_file_that_torch_refuses_to_unpickle_is_not_damaged(message: str, cause: str) -> None:
    lines = raised("[rank0]: ", message)
    if cause == "weights_only":
        lines.append(
            "[rank0]: \tWeightsUnpickler error: Unsupported global: GLOBAL argparse.Namespace was "
            "not an allowed global by default."
        )
    verdict = verdict_on(lines)
    assert (verdict.cause, verdict.rank) == (cause, 0)
    assert ("checkpoint before it" in verdict.do) is (cause == "damaged_file")
