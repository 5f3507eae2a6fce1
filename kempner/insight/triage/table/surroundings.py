"""What is around the program: containers, their images and caches, and what sbatch and srun refuse.

Of pyxis and enroot see https://github.com/NVIDIA/pyxis/issues/78 and /127 (images), /12 (folders)
and https://github.com/NVIDIA/enroot/issues/83 (room); of Slurm src/common/slurm_errno.c.
"""

from __future__ import annotations

from kempner.insight.triage.rules import Blame, Cause, Sign

NAMED = Blame.NAMED

CAUSES = (
    Cause(
        "no_container_plugin",
        "this srun does not know containers: the site has no plugin pyxis",
        'leave the --container options out, and use a command: slurm.container.prefix=["apptainer",'
        ' "exec", "--nv", "image.sif"]',
        (Sign(r"srun: unrecognized option '--(?:no-)?container-[\w-]+", blame=NAMED),),
    ),
    Cause(
        "container_cache",
        "there is no room for the container's image where it is fetched or unpacked",
        "point ENROOT_CACHE_PATH, ENROOT_DATA_PATH and ENROOT_TEMP_PATH (pyxis), or "
        "APPTAINER_CACHEDIR and APPTAINER_TMPDIR, to a file system with room, not to the home "
        "folder; `apptainer cache clean` empties the cache",
        (
            Sign(r"pyxis: .*(?:No space left on device|[Dd]isk quota exceeded)"),
            Sign(r"(?i)FATAL: +While making image .*(?:no space left|quota exceeded)"),
        ),
    ),
    Cause(
        "container_folders",
        "enroot cannot create its folders on a node",
        "ask the operators to set ENROOT_RUNTIME_PATH in enroot.conf to a folder of each user, and "
        "name the node",
        (Sign(r"pyxis: +mkdir: cannot create directory"),),
    ),
    Cause(
        "container_image",
        "the container's image cannot be fetched or opened",
        "check its name, and the registry's credentials (~/.config/enroot/.credentials, `apptainer "
        "registry login`); the path of a file must begin with / or ./; import it once into a file "
        "on a shared folder, and use that",
        (
            Sign(r"pyxis: (?:failed to import|couldn't start container)"),
            Sign(r"\[ERROR\] URL https?://\S+ returned error code"),
            Sign(r"FATAL: +(?:could not open image|Unable to handle \S+ uri|While making image)"),
        ),
    ),
    Cause(
        "container_gpus",
        "the container cannot reach the node's GPUs or their driver",
        "ask the job for GPUs (--gpus-per-node); if `nvidia-smi` fails on the node outside of the "
        "container, too, exclude the node and tell the operators",
        (Sign(r"nvidia-container-cli: (?:initialization|device|detection) error"),),
    ),
    Cause(
        "container_mount",
        "a folder cannot be mounted into the container",
        "see that it is there on every node, and its target in the image; slurm.container.mounts "
        "has SOURCE:TARGET",
        (
            Sign(r"enroot-mount: failed to mount"),
            Sign(r"FATAL: +container creation failed: .*(?:source|destination) \S+ doesn't exist"),
        ),
    ),
    Cause(
        "job_refused",
        "Slurm refuses the job: its partition, account or resources are none that it knows",
        "`sinfo -s` shows partitions, "
        "`sacctmgr show assoc user=$USER format=account,partition,qos` your accounts, "
        "`sinfo -o '%P %G'` the GPUs of each partition",
        (
            Sign(r"error: invalid partition specified", blame=NAMED),
            Sign(r"Invalid account or account/partition combination specified", blame=NAMED),
            Sign(
                r"error: .*(?:Invalid qos specification|Invalid node name specified)", blame=NAMED
            ),
            Sign(r"Invalid generic resource \(gres\) specification", blame=NAMED),
            Sign(r"Requested node configuration is not available", blame=NAMED),
        ),
    ),
)
