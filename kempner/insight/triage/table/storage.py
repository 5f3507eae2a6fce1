"""Files: disks that are full or fail, what is missing or damaged, and what has to be downloaded."""

from __future__ import annotations

from kempner.insight.triage.rules import Cause, Sign, SignLevel, Sure

MECHANISM, LIKELY = SignLevel.MECHANISM, Sure.LIKELY

CAUSES = (
    Cause(
        "disk_full",
        "a disk is full",
        "make room, or write elsewhere (df -h and df -i show blocks and inodes); old checkpoints "
        "are the usual reason, and /tmp for caches",
        (Sign(r"No space left on device|\[Errno 28\]|\bENOSPC\b"),),
    ),
    Cause(
        "quota",
        "a quota is used up: there is room on the disk, but not for this user or group",
        "delete files or have the quota raised (`quota -s`, `lfs quota`); also the number of files "
        "may count",
        (
            Sign(r"[Dd]isk quota exceeded|\[Errno 122\]|\bEDQUOT\b"),
            Sign(r"\[Errno 27\] File too large|File size limit exceeded", sure=LIKELY),
        ),
    ),
    Cause(
        "stale_file_handle",
        "a network file system has lost a file that was open (stale file handle)",
        "it was deleted or replaced from another node, or its server restarted: do not write what "
        "runs read, keep caches per node, and start again",
        (Sign(r"[Ss]tale (?:NFS )?file handle|\[Errno 116\]|\bESTALE\b"),),
    ),
    Cause(
        "storage_error",
        "storage failed (I/O error, or a file system that does not answer)",
        "ask the operators about the file system; start again when it works",
        (
            Sign(r"Input/output error|\[Errno 5\]|Remote I/O error|\[Errno 121\]"),
            Sign(r"[Tt]ransport endpoint (?:is not connected|shutdown)|\[Errno 10[78]\]"),
            Sign(r"Read-only file system|\[Errno 30\]"),
            Sign(r"\[Errno 110\] Connection timed out: '"),
        ),
    ),
    Cause(
        "checkpoint_write_failed",
        "a checkpoint could not be written to its end",
        "look for a full disk or quota where it is written: torch does not repeat the reason",
        (
            Sign(r"PytorchStreamWriter failed writing", MECHANISM, LIKELY),
            Sign(r"inline_container.*unexpected pos", MECHANISM, LIKELY),
        ),
    ),
    Cause(
        "weights_only",
        "torch.load refuses a file that holds more than tensors: since torch 2.6 it takes "
        "weights_only=True for granted",
        "if you trust its author, load it with weights_only=False, or allow the classes that the "
        "message names by torch.serialization.add_safe_globals; its other files are alike "
        "in that",
        (
            Sign(r"WeightsUnpickler error: Unsupported (?:global|class)"),
            Sign(r"Weights only load failed", sure=LIKELY),
        ),
    ),
    Cause(
        "damaged_file",
        "a file was read and is damaged or incomplete, a checkpoint most often",
        "use the checkpoint before it; a save that was killed leaves such files",
        (
            Sign(r"PytorchStreamReader failed|invalid header or archive is corrupted"),
            Sign(r"SafetensorError|HeaderTooLarge|InvalidHeader|incomplete metadata"),
            Sign(r"UnpicklingError|EOFError: Ran out of input|pickle data was truncated"),
            Sign(r"BadZipFile|unexpected end of (?:file|data)|file is truncated"),
        ),
    ),
    Cause(
        "checkpoint_mismatch",
        "a checkpoint does not fit the model",
        "load it with the configuration that it was saved with; the message names the parameters",
        (
            Sign(r"Error\(s\) in loading state_dict|size mismatch for \S+: copying"),
            Sign(r"loaded state dict .*(?:different number|doesn't match)"),
        ),
    ),
    Cause(
        "missing_file",
        "a file or folder is not there",
        "correct the path; if other nodes have it, it is not on a shared file system",
        (
            Sign(r"^(?:\w+\.)*FileNotFoundError\b|can't open file "),
            Sign(r"\[Errno 2\] No such file or directory"),
            Sign(r"^(?:\w+\.)*\w*Error: (?!.*shared object).*No such file or directory"),
            Sign(r"(?:bash|sh|script|srun|slurmstepd): .*: No such file or directory"),
            Sign(r"HFValidationError: Repo id must", sure=LIKELY),
            Sign(r"couldn't chdir to .*No such file", MECHANISM, LIKELY),
        ),
    ),
    Cause(
        "permission",
        "the program is not allowed to read or write a file",
        "look at the owner and the mode of the path, and of the folders above it",
        (Sign(r"^(?:\w+\.)*PermissionError\b|\[Errno 13\]|: Permission denied"),),
    ),
    Cause(
        "hub_access",
        "the Hugging Face hub refuses access to a model or data set",
        "accept its terms with the account, and give the job the token (HF_TOKEN); check the name",
        (
            Sign(r"GatedRepoError|RepositoryNotFoundError|Cannot access gated repo"),
            Sign(r"40[13] Client Error.*huggingface|is not a valid model identifier listed on"),
        ),
    ),
    Cause(
        "hub_offline",
        "a model, tokenizer or data set would have to be downloaded, and the node has no network",
        "download it on a login node into a shared HF_HOME first, then set HF_HUB_OFFLINE=1",
        (
            Sign(r"couldn't connect to '?https://huggingface\.co|Cannot reach https://hugg"),
            Sign(
                r"LocalEntryNotFoundError|OfflineModeIsEnabled|outgoing traffic has been disabled"
            ),
            Sign(
                r"(?:host='|//)(?:[\w.-]+\.)?(?:huggingface\.co|hf\.co)\b.*(?:retries|[Cc]onnect)"
            ),
            Sign(r"couldn't find (?:it|them) in the cached files|Offline mode is enabled"),
            Sign(r"Can't load (?:tokenizer|the model|the configuration|feature extractor|image)"),
        ),
    ),
    Cause(
        "hub_rate_limit",
        "the Hugging Face hub refuses more requests for now",
        "download once and share the cache, instead of once per rank",
        (Sign(r"429 (?:Client Error|Too Many Requests)|Too Many Requests for url"),),
    ),
)
