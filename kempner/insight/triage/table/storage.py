"""Files: disks that are full or fail, what is missing or damaged, and what has to be downloaded.

Ranks that do not meet, or lose each other.

Most of these are symptoms: the rank that complains is seldom the one that failed.
"""

from __future__ import annotations

from kempner.insight.triage.rules import Blame, Sign, SignLevel, Sure, cause

MECHANISM, LIKELY = SignLevel.MECHANISM, Sure.LIKELY

CAUSES = (
    cause(
        "disk_full",
        "a disk is full",
        "make room, or write elsewhere (df -h and df -i show blocks and inodes); old checkpoints "
        "are the usual reason, and /tmp for caches",
        Sign(r"No space left on device|\[Errno 28\]|\bENOSPC\b"),
    ),
    cause(
        "quota",
        "a quota is used up: there is room on the disk, but not for this user or group",
        "delete files or have the quota raised (`quota -s`, `lfs quota`); also the number of files "
        "may count",
        Sign(r"[Dd]isk quota exceeded|\[Errno 122\]|\bEDQUOT\b"),
        Sign(r"\[Errno 27\] File too large|File size limit exceeded", sure=LIKELY),
    ),
    cause(
        "stale_file_handle",
        "a network file system has lost a file that was open (stale file handle)",
        "it was deleted or replaced from another node, or its server restarted: do not write what "
        "runs read, keep caches per node, and start again",
        Sign(r"[Ss]tale (?:NFS )?file handle|\[Errno 116\]|\bESTALE\b"),
    ),
    cause(
        "storage_error",
        "storage failed (I/O error, or a file system that does not answer)",
        "ask the operators about the file system; start again when it works",
        Sign(r"Input/output error|\[Errno 5\]|Remote I/O error|\[Errno 121\]"),
        Sign(r"[Tt]ransport endpoint (?:is not connected|shutdown)|\[Errno 10[78]\]"),
        Sign(r"Read-only file system|\[Errno 30\]"),
        Sign(r"\[Errno 110\] Connection timed out: '"),
    ),
    cause(
        "checkpoint_write_failed",
        "a checkpoint could not be written to its end",
        "look for a full disk or quota where it is written: torch does not repeat the reason",
        Sign(r"PytorchStreamWriter failed writing", MECHANISM, LIKELY),
        Sign(r"inline_container.*unexpected pos", MECHANISM, LIKELY),
    ),
    cause(
        "weights_only",
        "torch.load refuses a file that holds more than tensors: since torch 2.6 it takes "
        "weights_only=True for granted",
        "if you trust its author, load it with weights_only=False, or allow the classes that the "
        "message names by torch.serialization.add_safe_globals; its other files are alike "
        "in that",
        Sign(r"WeightsUnpickler error: Unsupported (?:global|class)"),
        Sign(r"Weights only load failed", sure=LIKELY),
    ),
    cause(
        "damaged_file",
        "a file was read and is damaged or incomplete, a checkpoint most often",
        "use the checkpoint before it, a save that was killed leaves such files; of data, fetch "
        "the file again, or leave it out",
        Sign(r"PytorchStreamReader failed|invalid header or archive is corrupted"),
        Sign(r"SafetensorError|HeaderTooLarge|InvalidHeader|incomplete metadata"),
        Sign(r"UnpicklingError|EOFError: Ran out of input|pickle data was truncated"),
        Sign(r"BadZipFile|unexpected end of (?:file|data)|file is truncated"),
        Sign(r"cannot identify image file|broken data stream when reading image"),
        Sign(r"[Nn]ot a gzipped file|CRC check failed|[Cc]ompressed (?:file|data) ended before"),
        Sign(r"zlib\.error: Error|Error -3 while decompressing"),
        Sign(r"Parquet magic bytes not found|^(?:\w+\.)*ArrowInvalid: .*(?:Not an Arrow|magic)"),
        Sign(r"moov atom not found|truncated file: eof|file signature not found"),
        Sign(r"^(?:tarfile\.)?ReadError: (?:unexpected end|bad checksum|truncated|invalid header)"),
    ),
    cause(
        "checkpoint_mismatch",
        "a checkpoint does not fit the model",
        "load it with the configuration that it was saved with; the message names the parameters",
        Sign(r"Error\(s\) in loading state_dict|size mismatch for \S+: copying"),
        Sign(r"loaded state dict .*(?:different number|doesn't match)"),
        Sign(r"Missing key in checkpoint state_dict|Size mismatch between saved"),
        Sign(
            r"(?i)^(?:runtime|value|key|assertion)error: .*(?:\bsizes?\b|shape|\bkeys?\b|match)",
            sure=LIKELY,
            within=r"(?:load|set|restore)\w*(?:state|checkpoint|ckpt|weights|optim)"
            r"|(?:state|checkpoint|ckpt)\w*_(?:load|restore)",
        ),
    ),
    cause(
        "missing_file",
        "a file or folder is not there",
        "correct the path; if other nodes have it, it is not on a shared file system",
        Sign(r"^(?:\w+\.)*FileNotFoundError\b|can't open file "),
        Sign(r"\[Errno 2\] No such file or directory"),
        Sign(r"^(?:\w+\.)*\w*Error: (?!.*shared object).*No such file or directory"),
        Sign(r"(?:bash|sh|script|srun|slurmstepd): .*: No such file or directory"),
        Sign(r"HFValidationError: Repo id must", sure=LIKELY),
        Sign(r"couldn't chdir to .*No such file", MECHANISM, LIKELY),
    ),
    cause(
        "permission",
        "the program is not allowed to read or write a file",
        "look at the owner and the mode of the path, and of the folders above it",
        Sign(r"^(?:\w+\.)*PermissionError\b|\[Errno 13\]|: Permission denied"),
    ),
    cause(
        "hub_access",
        "the Hugging Face hub refuses access to a model or data set",
        "accept its terms with the account, and give the job the token (HF_TOKEN); check the name",
        Sign(r"GatedRepoError|RepositoryNotFoundError|Cannot access gated repo"),
        Sign(r"40[13] Client Error.*huggingface|is not a valid model identifier listed on"),
    ),
    cause(
        "hub_offline",
        "a model, tokenizer or data set would have to be downloaded, and the node has no network",
        "download it on a login node into a shared HF_HOME first, then set HF_HUB_OFFLINE=1",
        Sign(r"couldn't connect to '?https://huggingface\.co|Cannot reach https://hugg"),
        Sign(r"LocalEntryNotFoundError|OfflineModeIsEnabled|outgoing traffic has been disabled"),
        Sign(r"(?:host='|//)(?:[\w.-]+\.)?(?:huggingface\.co|hf\.co)\b.*(?:retries|[Cc]onnect)"),
        Sign(r"couldn't find (?:it|them) in the cached files|Offline mode is enabled"),
        Sign(r"Can't load (?:tokenizer|the model|the configuration|feature extractor|image)"),
    ),
    cause(
        "hub_rate_limit",
        "the Hugging Face hub refuses more requests for now",
        "download once and share the cache, instead of once per rank",
        Sign(r"429 (?:Client Error|Too Many Requests)|Too Many Requests for url"),
    ),
)


SYMPTOM = SignLevel.SYMPTOM
POSSIBLE, NAMED = Sure.POSSIBLE, Blame.NAMED


_SAYS = r"(?:rror|xception|ERROR|FATAL|CRITICAL)\b.*\b"
"""A line that calls itself an error: versions that differ are as often only remarked upon."""


def _complaint(pattern: str, warned: bool = False) -> Sign:
    """A rank complains of another, which the line may name."""
    return Sign(pattern, SYMPTOM, LIKELY, NAMED, warned)


NETWORK_CAUSES = (
    cause(
        "port_in_use",
        "the port on which the ranks meet is taken by another process",
        "choose another --master_port, or port 0 with --rdzv-backend=c10d; derive it from the "
        "job's id, and make sure that no earlier launch still runs on the node",
        Sign(r"EADDRINUSE|[Aa]ddress already in use"),
        Sign(r"(?:bind|listen).*[Aa]ddress already in use", MECHANISM, LIKELY, warned=True),
        Sign(r"failed to listen on any local network address", MECHANISM, LIKELY),
    ),
    cause(
        "wrong_interface",
        "the network interface that NCCL or Gloo uses does not lead to the other nodes",
        "compare `ip -br addr` on every node with NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME; a "
        "host name must not lead to 127.0.0.1 or 127.0.1.1 in /etc/hosts",
        Sign(r"[Nn]o (?:socket|usable) interface found|no NCCL_SOCKET_IFNAME interface"),
        Sign(r"connecting to address\s+with family \d+ is neither"),
        Sign(r"Unable to find (?:address|interface) for[: ]"),
        Sign(r"connect \[?127\.0\.\d\.1\]?[:<]?\d+.*refused|unsupported gloo device", sure=LIKELY),
        # What libvirt and docker call their bridges by default, and a host itself.
        Sign(
            r"[Cc]onnect\w* (?:timeout|timed out|refused).*"
            r"\b(?:192\.168\.122|172\.17\.0|127\.0\.\d)\.\d",
            sure=LIKELY,
        ),
    ),
    cause(
        "name_resolution",
        "a host name could not be resolved",
        "use the address of the first node instead, or correct the name; look whether DNS works on "
        "that node",
        Sign(r"Name or service not known|Temporary failure in name resolution"),
        Sign(r"gai error: -\d|getaddrinfo failed"),
    ),
    cause(
        "unreachable",
        "a node cannot reach another over the network",
        "check routes and firewall between the nodes, and that all use the same interface",
        Sign(r"No route to host|Network is unreachable"),
        _complaint(
            r"(?:gloo|NCCL WARN).*\b[Cc]onnect(?: to)? \[?(?P<address>\d+(?:\.\d+){3})\b.*refused"
        ),
    ),
    cause(
        "infiniband",
        "the InfiniBand adapter of a node reported an error",
        "look at `ibstat` and the node's dmesg, exclude the node, and tell the operators",
        Sign(r"Got async event\s*: (?:local catastrophic error|port error|device fatal)"),
        Sign(r"NET/IB.*Got async event\s*: (?!GID|client)", MECHANISM, LIKELY),
        Sign(r"NET/IBP? ?: ?Got completion from peer", MECHANISM, LIKELY),
        Sign(r"Call to ibv_\w+ failed", MECHANISM, LIKELY),
    ),
    cause(
        "version_mismatch",
        "versions do not fit: of NCCL, torch, CUDA or a package, on one node or between nodes",
        "give all nodes the same environment: compare `python -c 'import torch; "
        "print(torch.__version__, torch.cuda.nccl.version())'` on each",
        Sign(r"(?i)\bversion mismatch\b|\bmismatch(?:ed)? versions?\b", sure=LIKELY),
        Sign(r"[Mm]ismatched NCCL version|NCCL version mismatch|ncclVersionMismatch"),
        Sign(_SAYS + r"version .{0,60}(?:does not|doesn't|do not|don't) match"),
        Sign(_SAYS + r"(?i:version\b.{0,60}\bmismatche[sd]\b|versions (?:differ|disagree)\b)"),
        Sign(_SAYS + r"(?i:different (?:\w+ ){0,4}versions?\b)", sure=LIKELY),
        Sign(r"Loaded runtime CuDNN library: \S+ but source was compiled with", sure=LIKELY),
        Sign(r"did not match any variant of untagged enum", sure=LIKELY),  # a newer tokenizer.json
        Sign(r"does not recognize this architecture"),
        Sign(r"socketFinalizeAccept: wrong (?:type|magic)", MECHANISM, POSSIBLE),
    ),
    cause(
        "collective_mismatch",
        "ranks called different collectives, or with different shapes",
        "look for code that only some ranks run (if rank == 0, uneven batches) around a collective",
        Sign(r"[Dd]etected mismatch between collectives on ranks"),
        Sign(r"appears not to match sizes of the same param in process"),
        Sign(r"DDP expects same model across all ranks"),
    ),
    cause(
        "rank_missing",
        "a rank did not arrive where all ranks meet",
        "look at that rank's own output and its node: it is slow, stuck, or never started",
        Sign(r"Ranks? (?P<ranks>[\d, ]+) failed to pass monitoredBarrier", MECHANISM, blame=NAMED),
        _complaint(r"waiting for clients\. \d+/\d+ clients joined"),
        _complaint(r"DEADLINE_EXCEEDED: Barrier timed out"),
    ),
    cause(
        "nccl_init_timeout",
        "NCCL did not start in time: other ranks waited for the id that one rank has to give them",
        "in this order: is that rank still busy (loading, exporting, preparing data), did it fail "
        "with an ImportError, did it run out of memory; then the network: interface, firewall",
        _complaint(r"ncclUniqueId from \[(?P<rank>\d+)\].*(?:got error|[Tt]imeout|timed out)"),
        _complaint(r"ncclUniqueId.*\d+ ?ms"),
    ),
    cause(
        "rendezvous_timeout",
        "ranks could not reach the node where they were to meet",
        "check that rank 0 runs there, that address and port are the same on all nodes, and that "
        "no firewall or wrong interface is between them",
        _complaint(r"client socket has timed out .*connect to \(?\[?(?P<address>[\w.-]+)"),
        _complaint(r"Rendezvous(?:Timeout|Connection)Error"),
        _complaint(r"Timeout waiting for key: default_pg"),
        _complaint(r"[Cc]onnectFullMesh failed"),
        _complaint(r"gloo.*\bConnect timeout \[(?P<address>[\d.]+)\]"),
        Sign(r"client socket has failed to connect to \[?(?P<address>[\w.-]+)", SYMPTOM, POSSIBLE),
    ),
    cause(
        "nccl_timeout",
        "a collective of NCCL timed out: a rank did not come, or the network is stuck",
        "look at the stacks and the log of the rank that did not come; if all came, at the network "
        "(NCCL_DEBUG=INFO); a longer timeout helps only if a rank is busy for long on purpose",
        _complaint(r"lagging/dead/mismatched ranks that caused"),
        _complaint(r"Watchdog caught collective operation timeout"),
        _complaint(r"NCCL communicator was aborted.*[Tt]imeout"),
        _complaint(r"watchdog got stuck for \d+ seconds|[Hh]eartbeat monitor timed out"),
    ),
    cause(
        "gloo_timeout",
        "a collective of Gloo timed out: a rank did not come, or the network is stuck",
        "look for the rank that does not complain, at its stack and its node",
        _complaint(r"Timed out waiting \d+ ?ms for (?:send|recv) operation"),
    ),
    cause(
        "peer_lost",
        "ranks lost a peer: its end of the connection was closed",
        "look at the peer's own log and node; what made it end is not in this log",
        _complaint(r"[Cc]onnection closed by remote peer (?P<node>[A-Za-z][\w-]*)"),
        _complaint(
            r"[Cc]onnection (?:closed|reset) by (?:remote )?peer(?: \[?(?P<address>\d[\d.]+))?"
        ),
        _complaint(r"ncclRemoteError|remote process exited"),
        _complaint(r"task:(?P<rank>\d+) (?:heartbeat timeout|has been set to ERROR)"),
        _complaint(r"Terminating process because the (?:JAX distributed service|coordinator) det"),
        _complaint(r"Socket recv failed while polling|Broken pipe"),
        _complaint(r"Connection was likely closed", warned=True),
        Sign(r"RendezvousClosedError|DistStoreError", SYMPTOM, POSSIBLE, NAMED),
        _complaint(r"failed to recv, got \d+ bytes|^(?:\w+\.)*DistNetworkError\b"),
    ),
    cause(
        "nccl_error",
        "NCCL failed in a call to the system or to CUDA",
        "set NCCL_DEBUG=INFO and start again: the line `NCCL WARN` before it names the reason",
        Sign(r"unhandled (?:system|cuda) error", SYMPTOM, LIKELY),
        Sign(r"ncclSystemError|ncclInternalError|ncclUnhandledCudaError", SYMPTOM, LIKELY),
        Sign(r"ncclInvalidUsage|invalid usage, NCCL", SYMPTOM, LIKELY),
        Sign(r"^(?:\w+\.)*Dist(?:Backend)?Error\b|\bNCCL [Ee]rror\b", SYMPTOM, POSSIBLE),
        Sign(r"NCCL communicator was aborted|HorovodInternalError", SYMPTOM, POSSIBLE),
    ),
)
