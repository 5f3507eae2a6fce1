"""GPUs and their drivers.

Xid numbers: https://docs.nvidia.com/deploy/xid-errors/. Those of programs (13, 31, 43, 45, 68) say
nothing against the GPU.

Memory that runs out: of a GPU, of a node, shared memory, and workers that die of it.
"""

from __future__ import annotations

from kempner.insight.triage.rules import Blame, Sign, SignLevel, Sure, cause

GIVEN, MECHANISM = SignLevel.GIVEN, SignLevel.MECHANISM
LIKELY = Sure.LIKELY

_XID = r"NVRM: Xid \([^)]*\): "
_EXCLUDE = "exclude the node (sbatch --exclude=NODE) and tell the operators; nothing in the program"

CAUSES = (
    cause(
        "gpu_memory_error",
        "a GPU has an uncorrectable memory error (ECC)",
        f"{_EXCLUDE} is at fault. A reset or reboot remaps the row; if it returns, the GPU is bad",
        Sign(r"hipErrorECCNotCorrectable", GIVEN),
        Sign(r"uncorrectable ECC error|ECC_UNCORRECTABLE|ECCUncorrectable", GIVEN),
        Sign(_XID + r"(?:48|63|64|94|95|140)\b", GIVEN),
        Sign(r"[Rr]ow[- ]remap\w* (?:failure|failed|pending)|[Dd]ouble [Bb]it ECC", GIVEN),
        Sign(r"amdgpu.*uncorrectable hardware errors|RAS.*[Uu]ncorrectable", GIVEN),
    ),
    cause(
        "gpu_lost",
        "a GPU does not answer any more",
        f"{_EXCLUDE} is at fault. The node needs at least a reboot",
        Sign(r"fallen off the bus", GIVEN),
        Sign(_XID + r"(?:79|119|120|62|92)\b", GIVEN),
        Sign(r"(?i)GPU \S+ (?:is )?unhealthy|GPU requires reset", GIVEN, LIKELY),
        Sign(r"GPU is lost|Unable to determine the device handle for GPU", GIVEN),
        Sign(r"amdgpu.*(?:GPU reset begin|ring \w+ timeout)|HW Exception by GPU", GIVEN),
    ),
    cause(
        "gpu_link",
        "a link between GPUs (NVLink, NVSwitch, XGMI) failed",
        f"{_EXCLUDE} is at fault",
        Sign(_XID + r"(?:74|137|155)\b", GIVEN),
        Sign(r"[Uu]ncorrectable NVLink error|cudaErrorNvlinkUncorrectable", GIVEN),
        Sign(r"system not yet initialized|cudaErrorSystemNotReady"),
    ),
    cause(
        "device_assert",
        "a check in a CUDA kernel failed, most often an index that is out of range",
        "compare the ids in the data with the sizes of vocabulary and labels; run on the CPU or "
        "with CUDA_LAUNCH_BLOCKING=1 to see the line",
        Sign(r"device-side assert triggered", MECHANISM),
        Sign(r"[Bb]lock: \[.*[Tt]hread: \[.*Assertion .* failed"),
    ),
    cause(
        "illegal_memory_access",
        "a GPU kernel read or wrote where it must not. The GPU says so later: the line shown is "
        "not the place",
        "start with CUDA_LAUNCH_BLOCKING=1 or under compute-sanitizer (on AMD "
        "AMD_SERIALIZE_KERNEL=3) to find the kernel; if only one node does it, suspect its GPU",
        Sign(r"illegal memory access", MECHANISM),
        Sign(r"Memory access fault by GPU|amdgpu.*page fault", MECHANISM),
        Sign(_XID + r"(?:13|31)\b", MECHANISM, LIKELY),
        Sign(r"misaligned address|illegal instruction was encountered", MECHANISM),
    ),
    cause(
        "cuda_failure",
        "a CUDA kernel or call failed without a reason that would tell more",
        "look at the node's dmesg for Xid; start with CUDA_LAUNCH_BLOCKING=1 to see the line",
        Sign(r"HSA_STATUS_ERROR_(?:HARDWARE_)?EXCEPTION", MECHANISM, LIKELY),
        Sign(r"unspecified launch failure|CUDA error: unknown error", MECHANISM, LIKELY),
        Sign(r"CUBLAS_STATUS_(?:EXECUTION_FAILED|NOT_INITIALIZED)", MECHANISM, LIKELY),
        Sign(r"CUDNN_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|MAPPING)", MECHANISM, LIKELY),
    ),
    cause(
        "gpu_driver",
        "the GPU's driver and the CUDA or ROCm of torch do not fit",
        "install a torch that is built for the driver's CUDA version, or have the driver updated; "
        "if other nodes work, exclude this one",
        Sign(r"NVIDIA driver on your system is too old", warned=True),
        Sign(r"CUDA driver version is insufficient"),
        Sign(r"no kernel image is available|hipErrorNoBinaryForGpu|invalid device function"),
        Sign(r"forward compatibility was attempted|unsupported display driver"),
        Sign(r"Failed to initialize NVML: Driver/library version mismatch"),
        Sign(r"libcuda\.so\.1: cannot open shared object"),
    ),
    cause(
        "no_gpu",
        "a process sees no GPU, or fewer than it wants to use",
        "compare --gres or --gpus-per-task with the number of processes, and CUDA_VISIBLE_DEVICES; "
        "look at nvidia-smi on the node",
        Sign(r"No (?:CUDA|HIP) GPUs are available|no CUDA-capable device is detected"),
        Sign(r"invalid device ordinal|Found no NVIDIA driver on your system"),
        Sign(r"CUDA-capable device\(s\) is/are busy or unavailable"),
    ),
    cause(
        "duplicate_gpu",
        "two ranks use the same GPU",
        "call torch.cuda.set_device(local_rank) first, and start as many processes as GPUs",
        Sign(r"Duplicate GPU detected\s*: rank (?P<rank>\d+)"),
    ),
)


NAMED = Blame.NAMED

MEMORY_CAUSES = (
    cause(
        "cuda_out_of_memory",
        "a GPU ran out of memory",
        "use a smaller micro batch, activation checkpointing or more sharding; if another process "
        "holds memory on that GPU, find it with nvidia-smi on the node",
        Sign(r"\b(?:CUDA|HIP) (?:error: )?out of memory"),
        Sign(r"OutOfMemoryError: .*(?:GPU|CUDA|HIP|allocate)"),
        Sign(r"Cuda failure '?(?:2 )?'?out of memory|Failed to CUDA (?:calloc|malloc)"),
        Sign(r"cudaErrorMemoryAllocation|cuda failed with error 2 out of memory"),
        Sign(r"RESOURCE_EXHAUSTED: (?:Out of memory|Failed to allocate)"),
        Sign(r"CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED", MECHANISM, LIKELY),
    ),
    cause(
        "host_out_of_memory",
        "the memory of the node, or the job's share of it, ran out",
        "ask for more (--mem), or use less: fewer loader workers, a smaller prefetch, no second "
        "copy of the weights while loading",
        Sign(r"[Dd]etected \d+ oom[-_ ]?kill", GIVEN),
        Sign(
            r"srun: error: (?P<node>[\w.-]+): tasks? (?P<ranks>[\d,-]+): Out Of Memory",
            GIVEN,
            blame=NAMED,
        ),
        Sign(r"(?:Out of memory|out of memory): Kill(?:ed)? process (?P<pid>\d+)", GIVEN),
        Sign(r"oom-kill:constraint=|oom_reaper: reaped process|\bOOMKilled\b", GIVEN),
        Sign(r"killed due to the node running low on memory|memory pressure \(OOM\)", GIVEN),
        Sign(r"^(?:\w+\.)*MemoryError\b|^out of memory(?: in phase \w+|:)"),
        Sign(r"DefaultCPUAllocator: (?:not enough memory|can't allocate memory)"),
        Sign(r"\[Errno 12\] Cannot allocate memory"),
        Sign(r"std::bad_alloc", MECHANISM, LIKELY),
    ),
    cause(
        "shared_memory",
        "a data loader worker had no room in shared memory (/dev/shm), and died of it",
        "raise it (docker --shm-size or --ipc=host; a larger tmpfs), use fewer workers, or "
        "torch.multiprocessing.set_sharing_strategy('file_system')",
        Sign(r"bus error encountered in worker|insufficient shared memory"),
        Sign(r"killed by signal: Bus error|out of shared memory"),
        Sign(r"unable to (?:open|write|mmap|resize)[^.]* shared memory"),
        Sign(r"No space left on device.*/(?:dev/shm|torch_)|/dev/shm.*No space left"),
    ),
    cause(
        "loader_worker_died",
        "a process of the data loader died",
        "if it was killed, suspect host memory (sacct, dmesg); otherwise start with num_workers=0 "
        "to see its own error",
        Sign(r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) .*(?:killed by signal|exited)"),
        Sign(r"DataLoader worker exited unexpectedly", MECHANISM),
    ),
    cause(
        "process_limit",
        "a process could not start another process or thread",
        "raise the limits (ulimit -u, the job's pids.max), or use fewer threads and workers "
        "(OMP_NUM_THREADS=1)",
        Sign(r"can't start new thread|[Tt]hread creation failed|pthread_create failed"),
        Sign(r"\[Errno 11\] Resource temporarily unavailable"),
    ),
    cause(
        "open_files",
        "a process has too many open files",
        "raise `ulimit -n`, or set_sharing_strategy('file_system') for loader workers",
        Sign(r"Too many open files|received 0 items of ancdata"),
    ),
    cause(
        "locked_memory",
        "InfiniBand could not lock memory",
        "raise the limit of locked memory for jobs (ulimit -l unlimited; PropagateResourceLimits)",
        Sign(r"ibv_(?:reg_mr|create_\w+).*(?:Cannot allocate memory|failed.*ENOMEM)", sure=LIKELY),
    ),
)
