"""All rows of the table, and a quick look at whether a line can match any."""

from __future__ import annotations

from kempner.insight.triage.rules import Cause, Sign
from kempner.insight.triage.table import device, program, scheduler, storage

TABLE: tuple[tuple[Sign, Cause], ...] = tuple(
    (sign, cause)
    for causes in (
        scheduler.SURROUNDINGS_CAUSES,
        scheduler.CAUSES,
        device.MEMORY_CAUSES,
        device.CAUSES,
        storage.CAUSES,
        program.CAUSES,
        storage.NETWORK_CAUSES,
    )
    for cause in causes
    for sign in cause.signs
)
"""Every sign with its cause; the first that matches a line counts."""

CAUSES: dict[str, Cause] = {
    cause.name: cause
    for causes in (
        device.MEMORY_CAUSES,
        device.CAUSES,
        storage.CAUSES,
        (program.RAISED, *program.CAUSES),
        storage.NETWORK_CAUSES,
        scheduler.CAUSES,
        scheduler.SURROUNDINGS_CAUSES,
    )
    for cause in causes
}
"""Every cause by its name."""

_WORDS = """
rror xcept unhealthy HSA_STATUS too|large limit|exceeded ersion TASK NOT|ENDING ersions ailed
ailure illed illing illegal CANCEL Traceback ignal SIG imeout imed|out OUT_OF Out|of out|of
Out|Of oom can't annot couldn't enied nvalid ismatch Xid ault remap lost fallen refused closed
reset Bus|err nterrupt ssert NODE_ family Duplicate uota tale already xit undefined busy
received bad_alloc EADDR EDQUOT ENOSPC ESTALE launch CUBLAS CUDNN not|found too|old interface
not|known route hared GLIBC Too|many kernel|image chdir truncated ompat responding DOWN died
huggingface misaligned insufficient collectives sizes|of same|model clients lagging EOF
corrupted state|dict identifier gated 429 unreachable VersionConflict NotFound wandb
prior|iteration No|module No|such No|space No|CUDA No|HIP No|GPU no|CUDA no|kernel Terminating
aborted entire|process To|avoid|data asynchronous ncorrectable UNCORRECT ECC not|yet
unsupported river ordinal rrno nexpected incomplete TooLarge BadZip are|unknown diverged
oss|scale async|event completion ncclUniqueId recv Broken shutdown ncclInternal nmatched memory
traffic cached ffline nan Nan NaN NAN is|inf was|inf became|inf =|inf worker DUE|TO load Many
name|or resolution unhandled wrong gai Read-only endpoint /dev/shm loss|is bus|error
appears|not REQUEUED barrier Unable tasks NCCL|WARN ring not|respond initialized no|NCCL
no|socket no|usable device nstruction
unrecognized exclusive two|different quota While|making FATAL [ERROR] configuration
"""
"""Every sign needs one of these in its line; `|` stands for a space."""

LITERALS = tuple(word.replace("|", " ") for word in _WORDS.split())


def suspicious(text: str) -> bool:
    """Whether a sign may match: true for each that does, for few others, and cheap to ask of
    gigabytes of noise."""
    return any(map(text.__contains__, LITERALS))
