"""What Slurm does to a job, and how processes end.

Slurm's words: https://slurm.schedmd.com/sacct.html#SECTION_JOB-STATE-CODES and src/srun.

What is around the program: containers, their images and caches, and what sbatch and srun refuse.

Of pyxis and enroot see https://github.com/NVIDIA/pyxis/issues/78 and /127 (images), /12 (folders)
and https://github.com/NVIDIA/enroot/issues/83 (room); of Slurm src/common/slurm_errno.c.
"""

from __future__ import annotations

from kempner.insight.triage.rules import Blame, Sign, SignLevel, Sure, cause

GIVEN, MECHANISM, CASCADE = SignLevel.GIVEN, SignLevel.MECHANISM, SignLevel.CASCADE
LIKELY, NAMED = Sure.LIKELY, Blame.NAMED

_GOT = r"(?i:\b(?:got|receive[ds]?|receiving|caught|trapped|bypassing|handl\w+)\b)[^.]{0,40}?"
_SIGNAL = r"(?i:\bsignal (?:10|12|15|18)\b|\bSIG(?:TERM|USR[12]|CONT)\b)"
_ARRIVED = r"(?i:.{0,20}\b(?:received|caught|arrived|handler)\b)"
"""A process says that it was told to end, in its own words."""

CAUSES = (
    cause(
        "time_limit",
        "the job reached its time limit",
        "raise --time, or save before the limit and requeue: --signal=B:TERM@120 and --requeue",
        Sign(r"CANCELLED AT \S+ DUE TO TIME LIMIT", blame=NAMED),
        ends_from_outside=True,
    ),
    cause(
        "preemption",
        "Slurm preempted the job for another of higher priority",
        "requeue it and go on from its checkpoint; save at least as often as the grace time allows",
        Sign(r"CANCELLED AT \S+ DUE TO PREEMPTION", blame=NAMED),
        ends_from_outside=True,
    ),
    cause(
        "requeued",
        "the job was put back into the queue while it ran",
        "nothing, if it goes on from its checkpoint; `sacct -D -j JOB` shows each launch",
        Sign(r"CANCELLED AT \S+ DUE TO JOB REQUEUE", blame=NAMED),
        ends_from_outside=True,
    ),
    cause(
        "cancelled",
        "the job was cancelled",
        "ask `sacct -j JOB --format=State%30` who: it says CANCELLED by and the user's number",
        Sign(r"\*\*\* JOB \S+ ON \S+ CANCELLED AT \S+ \*\*\*", MECHANISM, LIKELY, NAMED),
        ends_from_outside=True,
    ),
    cause(
        "node_failure",
        "a node failed",
        "exclude the node (sbatch --exclude=NODE), requeue, and tell the operators its name",
        Sign(r"(?:srun|salloc): error: Node failure on (?P<node>[\w.-]+)", GIVEN, blame=NAMED),
        Sign(r"DUE TO NODE FAILURE", GIVEN, blame=NAMED),
        Sign(r"DUE TO NODE (?P<node>[\w.-]+) FAILURE", GIVEN, blame=NAMED),
        Sign(r"Node (?P<node>[\w.-]+) (?:is )?(?:not responding|DOWN)\b", GIVEN, LIKELY, NAMED),
    ),
    cause(
        "cpu_binding",
        "srun was told to bind tasks to CPUs that its job does not have: as a rule by a "
        "SLURM_CPU_BIND that another job or shell has left",
        "before srun, unset SLURM_CPU_BIND, SLURM_CPU_BIND_TYPE, SLURM_CPU_BIND_LIST and "
        "SLURM_CPU_BIND_VERBOSE, submit from outside of a job, or give --cpu-bind=none; no node is "
        "to blame",
        Sign(r"error: CPU binding outside of job step allocation", blame=NAMED),
        Sign(r"Unable to satisfy cpu bind request", blame=NAMED),
    ),
    cause(
        "contradictory_options",
        "srun refuses what the job's variables and its own options say together",
        "ask for memory in one way (--mem, --mem-per-cpu or --mem-per-gpu), and for CPUs in one; "
        "before srun, or in the shell that submits, unset what another job has left: "
        "SLURM_MEM_PER_CPU, SLURM_MEM_PER_GPU, SLURM_MEM_PER_NODE, SLURM_CPUS_PER_TASK, "
        "SLURM_TRES_PER_TASK",
        Sign(r"(?:MEM_PER_|--mem).* are mutually exclusive", blame=NAMED),
        Sign(r"cpus.per.task set by two different environment variables", blame=NAMED),
    ),
    cause(
        "launch_failure",
        "Slurm could not start the processes on a node",
        "try again without the node; if it is any node, check the step's options and the clocks",
        Sign(r"Task launch for \S+ failed on node (?P<node>[\w.-]+)", blame=NAMED),
        Sign(r"(?:srun|slurmstepd): error: .*(?:execve\(\)|Unable to create step for job)"),
        Sign(r"JobLaunchFailure|launch failed requeued held", blame=NAMED),
        Sign(r"Exec format error"),
    ),
    cause(
        "killed",
        "a process was killed with SIGKILL (9; a shell says 137); nothing here says by whom",
        "ask `sacct -j JOB --format=JobID,State,ExitCode,MaxRSS` and the node's dmesg: most often "
        "it is the kernel, for lack of host memory, but Slurm and people send it as well",
        Sign(r"died with <Signals\.SIGKILL", MECHANISM, LIKELY),
        Sign(r"kempner: rank (?P<rank>\d+) was killed by SIGKILL", MECHANISM, LIKELY, NAMED),
        Sign(r"(?:^|line \d+:\s+\d+ )Killed\b", MECHANISM, LIKELY),
    ),
    cause(
        "segfault",
        "a process crashed with a segmentation fault (SIGSEGV) in native code",
        "start with PYTHONFAULTHANDLER=1 to see the Python line; suspect extensions, NCCL and "
        "driver versions, or the node if it is always the same",
        Sign(r"Fatal Python error: Segmentation fault", MECHANISM),
        Sign(r"Caught signal 11|died with <Signals\.SIGSEGV", MECHANISM),
        Sign(r"Segmentation fault\b", MECHANISM, LIKELY),
    ),
    cause(
        "bus_error",
        "a process got a bus error (SIGBUS): a mapped file or shared memory was not there",
        "look at free space in /dev/shm and on the disk, and whether a mapped file was truncated",
        Sign(r"Fatal Python error: Bus error|died with <Signals\.SIGBUS", MECHANISM),
        Sign(r"line \d+:\s+\d+ Bus error", MECHANISM),
    ),
    cause(
        "illegal_instruction",
        "a process ran an instruction that the node's processor does not have (SIGILL)",
        "the binary was built for another processor: rebuild it, or choose nodes with --constraint",
        Sign(r"Fatal Python error: Illegal instruction", MECHANISM),
        Sign(r"line \d+:\s+\d+ Illegal instruction", MECHANISM),
    ),
    cause(
        "arithmetic_trap",
        "a process divided by zero in native code (SIGFPE)",
        "look at the native library that ran; an update of cuBLAS or the kernel's inputs may help",
    ),
    cause(
        "aborted",
        "a process aborted itself (SIGABRT)",
        "the lines before it say why; torch's NCCL watchdog does so when a collective times out",
    ),
    cause(
        "terminated",
        "processes got SIGTERM (15; a shell says 143): something outside of them ended them",
        "look at the end of the job in `sacct`, and in the logs of the ranks that are not here",
    ),
    cause(
        "interrupted",
        "the program was interrupted with Ctrl-C (SIGINT)",
        "start it again; if no user pressed it, look for what sends SIGINT to the job",
        Sign(r"^KeyboardInterrupt\b", MECHANISM, LIKELY),
    ),
    cause(
        "exit_code",
        "a process ended with an exit code that is no success, and without saying why",
        "look at that rank's own output: its error is not in this log",
    ),
    cause(
        "cascade",
        "a process was ended because another had ended",
        "look for the first that ended",
        Sign(r"closing signal SIGTERM|Killing subprocess \d+", CASCADE, warned=True),
        Sign(r"^(?:\w+\.)*(?:SIGTERMException|SignalException)\b", CASCADE),
        Sign(_GOT + _SIGNAL + r"|" + _SIGNAL + _ARRIVED, CASCADE, warned=True),
        Sign(r"killed by signal: Terminated", CASCADE),
        Sign(r"CANCELLED AT \S+ DUE TO TASK FAILURE|NOT ENDING WITH SIGNALS", CASCADE),
        Sign(r"srun: (?:Terminating|Job step aborted)", CASCADE),
        Sign(r"\*\*\* STEP \S+ ON \S+ CANCELLED AT \S+ \*\*\*", CASCADE),
        Sign(r"(?:ChildFailedError|ProcessRaisedException|ProcessExitedException)\b", CASCADE),
        Sign(r"^(?:\w+\.)*CheckpointException\b", CASCADE),
        Sign(r"^(?:\w+\.)*CalledProcessError\b|^SystemExit\b", CASCADE),
        Sign(r"taking the entire process down|To avoid data inconsistency", CASCADE),
        Sign(r"due to the asynchronous nature of CUDA kernels", CASCADE),
    ),
)


SURROUNDINGS_CAUSES = (
    cause(
        "no_container_plugin",
        "this srun does not know containers: the site has no plugin pyxis",
        'leave the --container options out, and use a command: slurm.container.prefix=["apptainer",'
        ' "exec", "--nv", "image.sif"]',
        Sign(r"srun: unrecognized option '--(?:no-)?container-[\w-]+", blame=NAMED),
    ),
    cause(
        "container_cache",
        "there is no room for the container's image where it is fetched or unpacked",
        "point ENROOT_CACHE_PATH, ENROOT_DATA_PATH and ENROOT_TEMP_PATH (pyxis), or "
        "APPTAINER_CACHEDIR and APPTAINER_TMPDIR, to a file system with room, not to the home "
        "folder; `apptainer cache clean` empties the cache",
        Sign(r"pyxis: .*(?:No space left on device|[Dd]isk quota exceeded)"),
        Sign(r"(?i)FATAL: +While making image .*(?:no space left|quota exceeded)"),
    ),
    cause(
        "container_folders",
        "enroot cannot create its folders on a node",
        "ask the operators to set ENROOT_RUNTIME_PATH in enroot.conf to a folder of each user, and "
        "name the node",
        Sign(r"pyxis: +mkdir: cannot create directory"),
    ),
    cause(
        "container_image",
        "the container's image cannot be fetched or opened",
        "check its name, and the registry's credentials (~/.config/enroot/.credentials, `apptainer "
        "registry login`); the path of a file must begin with / or ./; import it once into a file "
        "on a shared folder, and use that",
        Sign(r"pyxis: (?:failed to import|couldn't start container)"),
        Sign(r"\[ERROR\] URL https?://\S+ returned error code"),
        Sign(r"FATAL: +(?:could not open image|Unable to handle \S+ uri|While making image)"),
    ),
    cause(
        "container_gpus",
        "the container cannot reach the node's GPUs or their driver",
        "ask the job for GPUs (--gpus-per-node); if `nvidia-smi` fails on the node outside of the "
        "container, too, exclude the node and tell the operators",
        Sign(r"nvidia-container-cli: (?:initialization|device|detection) error"),
    ),
    cause(
        "container_mount",
        "a folder cannot be mounted into the container",
        "see that it is there on every node, and its target in the image; slurm.container.mounts "
        "has SOURCE:TARGET",
        Sign(r"enroot-mount: failed to mount"),
        Sign(r"FATAL: +container creation failed: .*(?:source|destination) \S+ doesn't exist"),
    ),
    cause(
        "job_refused",
        "Slurm refuses the job: its partition, account or resources are none that it knows",
        "`sinfo -s` shows partitions, "
        "`sacctmgr show assoc user=$USER format=account,partition,qos` your accounts, "
        "`sinfo -o '%P %G'` the GPUs of each partition",
        Sign(r"error: invalid partition specified", blame=NAMED),
        Sign(r"Invalid account or account/partition combination specified", blame=NAMED),
        Sign(r"error: .*(?:Invalid qos specification|Invalid node name specified)", blame=NAMED),
        Sign(r"Invalid generic resource \(gres\) specification", blame=NAMED),
        Sign(r"Requested node configuration is not available", blame=NAMED),
        Sign(r"error: .*(?:Requested time limit is invalid|violates accounting/QOS)", blame=NAMED),
    ),
)
