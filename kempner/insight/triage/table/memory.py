"""Memory that runs out: of a GPU, of a node, shared memory, and workers that die of it."""

from __future__ import annotations

from kempner.insight.triage.rules import Blame, Cause, Sign, SignLevel, Sure

GIVEN, MECHANISM = SignLevel.GIVEN, SignLevel.MECHANISM
LIKELY, NAMED = Sure.LIKELY, Blame.NAMED

CAUSES = (
    Cause(
        "cuda_out_of_memory",
        "a GPU ran out of memory",
        "use a smaller micro batch, activation checkpointing or more sharding; if another process "
        "holds memory on that GPU, find it with nvidia-smi on the node",
        (
            Sign(r"\b(?:CUDA|HIP) (?:error: )?out of memory"),
            Sign(r"OutOfMemoryError: .*(?:GPU|CUDA|HIP|allocate)"),
            Sign(r"Cuda failure '?(?:2 )?'?out of memory|Failed to CUDA (?:calloc|malloc)"),
            Sign(r"cudaErrorMemoryAllocation|cuda failed with error 2 out of memory"),
            Sign(r"CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED", MECHANISM, LIKELY),
        ),
    ),
    Cause(
        "host_out_of_memory",
        "the memory of the node, or the job's share of it, ran out",
        "ask for more (--mem), or use less: fewer loader workers, a smaller prefetch, no second "
        "copy of the weights while loading",
        (
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
    ),
    Cause(
        "shared_memory",
        "a data loader worker had no room in shared memory (/dev/shm), and died of it",
        "raise it (docker --shm-size or --ipc=host; a larger tmpfs), use fewer workers, or "
        "torch.multiprocessing.set_sharing_strategy('file_system')",
        (
            Sign(r"bus error encountered in worker|insufficient shared memory"),
            Sign(r"killed by signal: Bus error|out of shared memory"),
            Sign(r"unable to (?:open|write|mmap|resize)[^.]* shared memory"),
            Sign(r"No space left on device.*/(?:dev/shm|torch_)|/dev/shm.*No space left"),
        ),
    ),
    Cause(
        "loader_worker_died",
        "a process of the data loader died",
        "if it was killed, suspect host memory (sacct, dmesg); otherwise start with num_workers=0 "
        "to see its own error",
        (
            Sign(r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) .*(?:killed by signal|exited)"),
            Sign(r"DataLoader worker exited unexpectedly", MECHANISM),
        ),
    ),
    Cause(
        "process_limit",
        "a process could not start another process or thread",
        "raise the limits (ulimit -u, the job's pids.max), or use fewer threads and workers "
        "(OMP_NUM_THREADS=1)",
        (
            Sign(r"can't start new thread|[Tt]hread creation failed|pthread_create failed"),
            Sign(r"\[Errno 11\] Resource temporarily unavailable"),
        ),
    ),
    Cause(
        "open_files",
        "a process has too many open files",
        "raise `ulimit -n`, or set_sharing_strategy('file_system') for loader workers",
        (Sign(r"Too many open files|received 0 items of ancdata"),),
    ),
    Cause(
        "locked_memory",
        "InfiniBand could not lock memory",
        "raise the limit of locked memory for jobs (ulimit -l unlimited; PropagateResourceLimits)",
        (Sign(r"ibv_(?:reg_mr|create_\w+).*(?:Cannot allocate memory|failed.*ENOMEM)"),),
    ),
)
