"""All rows of the table, and a quick look at whether a line can match any.

Among them those of the program itself (its environment, its command line, a loss that is no
number), and what kempner's ledger says of a run, and no log would.
"""

from __future__ import annotations

from kempner.insight.triage.rules import Cause, Sign, SignLevel, cause
from kempner.insight.triage.table import device, scheduler, storage

RAISED = Cause(
    "exception",
    "the program raised an exception",
    "look at the line of the program below; the message is its own",
)
"""An exception that no rule knows."""

MECHANISM = SignLevel.MECHANISM

PROGRAM_CAUSES = (
    cause(
        "import_error",
        "a Python package is missing, or another version than the program wants",
        "install it in the environment that the job uses; if other nodes have it, the environment "
        "is not shared or not activated there",
        Sign(r"^(?:\w+\.)*ModuleNotFoundError\b|No module named '"),
        Sign(r"^(?:\w+\.)*ImportError: (?!.*(?:undefined symbol|shared object|GLIBC|ELF ))"),
        Sign(r"(?:VersionConflict|DistributionNotFound|PackageNotFoundError)\b"),
    ),
    cause(
        "binary_mismatch",
        "a compiled library does not fit the others, or is not there",
        "build the extension again for this torch, CUDA and system; do not mix conda, pip and "
        "modules; compare LD_LIBRARY_PATH on the nodes",
        Sign(r"undefined symbol|GLIBC(?:XX)?_[\d.]+' not found"),
        Sign(r"cannot open shared object file|invalid ELF header|wrong ELF class"),
        Sign(r"CUDA Setup failed despite|bitsandbytes library load error"),
        Sign(r"not compiled with CUDA|compiled without GPU support"),
        Sign(r"may indicate binary incompatibility|Error: Numpy is not available"),
    ),
    cause(
        "extension_build",
        "an extension in C++ or CUDA could not be compiled, which some libraries do at the start",
        "give the job a compiler and the CUDA toolkit of torch's version (CUDA_HOME), or compile "
        "it beforehand into a shared TORCH_EXTENSIONS_DIR; the compiler's own error is above",
        Sign(r"CUDA_HOME (?:does not exist|environment variable is not set)"),
        Sign(r"Error building extension '|ninja: build stopped", MECHANISM),
        Sign(r"Ninja is required to load C\+\+|unsupported GNU version!|nvcc fatal"),
        Sign(r"mismatches the version that was used to compile"),
        Sign(r"fatal error: \S+\.h(?:pp)?: No such file"),
    ),
    cause(
        "command_not_found",
        "a command is not there",
        "load the module or activate the environment in the job script, before srun",
        Sign(r"(?:line \d+: |bash: |sh: \d*:? ?)\S+: (?:command )?not found"),
        Sign(r"(?:execvp?|execve)\S*: .*No such file|module\(s\) are unknown"),
    ),
    cause(
        "usage",
        "the command line or the configuration is wrong",
        "correct it; the message names the argument",
        Sign(r"error: (?:unrecognized arguments|the following arguments are required)"),
        Sign(r"^\S+: error: (?:argument|invalid choice|ambiguous option)"),
        Sign(r"^(?:\w+\.)*(?:ConfigAttributeError|ConfigKeyError|ValidationError)\b"),
        Sign(r"environment variable \w+ expected, but not set"),
        Sign(r"^KeyError: '(?:RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)'"),
    ),
    cause(
        "loss_not_finite",
        "the loss or the gradients are not finite any more, or the loss diverged",
        "look at the loss before it; lower the learning rate, clip gradients, use bfloat16 instead "
        "of float16, look at the data of that step, and go back to an earlier checkpoint",
        Sign(r"loss scale already at minimum"),
        Sign(r"(?i)\bloss (?:is|was|became|=)\s?(?:nan|inf)\b.*(?:stop|abort|exit|terminat)"),
        Sign(r"(?i)^(?:\w+\.)*\w*(?:Error|Exception): .*\b(?:nan|inf)s?\b.*(?:loss|grad|norm)"),
        Sign(r"(?i)^(?:\w+\.)*\w*(?:Error|Exception): .*(?:loss|grad|norm).*\b(?:nan|inf)s?\b"),
        Sign(r"(?i)function '\w+' returned nan values|found nan in (?:local )?(?:grad|forward)"),
        Sign(r"Minimum loss scale reached|loss diverged"),
    ),
    cause(
        "unused_parameters",
        "DistributedDataParallel waits for gradients of parameters that this step did not use",
        "pass find_unused_parameters=True, or use all parameters on every rank in every step",
        Sign(r"Expected to have finished reduction in the prior iteration"),
    ),
    cause(
        "experiment_logger",
        "the logger of metrics (Weights & Biases) failed, and took the program with it",
        "set WANDB_MODE=offline on nodes without network, or give the job its API key",
        Sign(r"wandb\.(?:errors?|sdk)\.\S*(?:CommError|UsageError|AuthenticationError)"),
    ),
)


NOTHING = Cause("none", "nothing failed", "nothing")
"""A run that goes on, has made its last step, or has not begun."""

HANG = Cause(
    "hang",
    "no rank made progress any more",
    "look at the stacks of the rank that the others waited for (rank-N.stacks), and at its node",
)

BAD_DATA = Cause(
    "bad_data",
    "data or a checkpoint was read, and is damaged or does not fit",
    "repair or replace what the sentence names",
)

DISAPPEARED = Cause(
    "rank_disappeared",
    "a rank was gone without a message: its node or the network to it",
    "ask `sinfo -R` and the operators about the node; kempner leaves it out if evidence is found",
)

UNEXPLAINED = Cause(
    "unknown",
    "nothing in the run's directory says why",
    "look at the last lines of the ranks' logs, and at the job's output",
)

STOPPED = Cause("stopped", "the ranks were asked to stop", "start it again to go on")

_ROWS = (
    *scheduler.SURROUNDINGS_CAUSES,
    *scheduler.CAUSES,
    *device.MEMORY_CAUSES,
    *device.CAUSES,
    *storage.CAUSES,
    *PROGRAM_CAUSES,
    *storage.NETWORK_CAUSES,
)
TABLE: tuple[tuple[Sign, Cause], ...] = tuple((sign, row) for row in _ROWS for sign in row.signs)
"""Every sign with its cause; the first that matches a line counts."""

CAUSES: dict[str, Cause] = {row.name: row for row in (RAISED, *_ROWS)}

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
unrecognized exclusive two|different quota While|making FATAL [ERROR] configuration RESOURCE_
DEADLINE_ zipped ended|before magic moov signature ELF incompat CUDA_HOME variant stuck|for
required|to GNU|version broken|data Missing|key compiled build|stopped expected, recognize
set|to|ERROR nvcc|fatal
"""
"""Every sign needs one of these in its line; `|` stands for a space."""

LITERALS = tuple(word.replace("|", " ") for word in _WORDS.split())


def suspicious(text: str) -> bool:
    """Whether a sign may match: true for each that does, for few others, and cheap to ask of
    gigabytes of noise."""
    return any(map(text.__contains__, LITERALS))
