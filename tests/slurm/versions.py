"""Newer Slurms than the machine's own, each in a folder: `/usr` of a later Debian.

    python tests/slurm/versions.py [VERSION...]

makes the folders, or those of all versions, and prints what is in each. The packages come from the
Debian mirror of the machine's own apt sources; nothing of the machine's own packages changes. The
folders (430 MB each) are in ~/.cache/kempner, or where KEMPNER_SLURM_ROOTS says, and are made once.
`node.sh` puts such a `/usr` in the place of a machine's own; the rest stays, so a Python that lies
under /usr itself (but for /usr/local) cannot be used with them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run by hand

from harness import made_once

SUITES = {"24.11": "trixie", "26.05": "forky"}
"""Debian's suite that has this version."""

PACKAGES = (
    *("slurm-wlm", "slurmdbd", "munge", "mariadb-server", "iproute2", "procps", "bsdutils"),
    "mount",  # no longer essential
    "python3",  # for the libraries that a Python elsewhere needs
    "?essential",
)

WITHOUT_ALTERNATIVES = ("slurmctld", "slurmd", "slurmstepd")
"""Programs called NAME-wlm in their packages, whose scripts, which do not run here, add links."""


class NoRoot(Exception):
    """Why there can be no such Slurm here, in a few words."""


def root_of(version: str) -> Path:
    """The folder whose `usr` has this version of Slurm, made by the process that needs it first."""
    if version not in SUITES:
        raise NoRoot(f"Slurm {version} is not one of {', '.join(SUITES)}")
    suite = SUITES[version]
    if os.geteuid() != 0:
        raise NoRoot(f"Slurm {version} needs root")
    if lacking := [tool for tool in ("apt-get", "dpkg-deb", "tar") if shutil.which(tool) is None]:
        raise NoRoot(f"Slurm {version} comes in packages of Debian, and needs {', '.join(lacking)}")
    if Path(sys.base_prefix) == Path("/usr"):
        raise NoRoot(f"Slurm {version} brings its own /usr, and Python must lie elsewhere")
    folder = _cache() / f"slurm-{suite}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        made_once(folder, lambda folder: _make(folder, suite))
    except subprocess.CalledProcessError as error:
        said = (error.stdout or b"").decode(errors="replace").strip()
        raise NoRoot(f"Slurm {version} of Debian {suite} cannot be had: {said[-500:]}") from error
    return folder


def why_no_root(version: str) -> str:
    """Why there can be no such Slurm here; empty if there can."""
    try:
        root_of(version)
    except NoRoot as error:
        return str(error)
    return ""


def told_version(root: Path | None) -> str:
    """What Slurm calls its version, such as "24.11.5"; without a root, the machine's own."""
    enter = "" if root is None else 'mount --rbind "$0/usr" /usr && '
    said = _run("unshare", "--mount", "sh", "-c", f"{enter}slurmd -V", str(root or "")).split()
    return said[-1].decode()


def _cache() -> Path:
    if told := os.environ.get("KEMPNER_SLURM_ROOTS"):
        return Path(told)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kempner"


def _make(folder: Path, suite: str) -> None:
    """Download the packages with an apt of its own, which knows of nothing installed, and unpack
    them; their scripts do not run."""
    apt = folder / "apt"
    for name in ("lists", "archives"):
        (apt / name / "partial").mkdir(parents=True)
    (apt / "status").touch()
    (apt / "sources.list").write_text(f"deb {_mirror()} {suite} main\n")
    places = {
        "Dir::State": apt,
        "Dir::State::status": apt / "status",
        "Dir::Cache": apt,
        "Dir::Etc::SourceList": apt / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::Etc::PreferencesParts": "/dev/null",
        "APT::Sandbox::User": "root",
    }
    own_apt = ["apt-get", "--quiet=2", *(f"-o{key}={value}" for key, value in places.items())]
    _run(*own_apt, "update", "--error-on=any")
    _run(*own_apt, "--yes", "--no-install-recommends", "--download-only", "install", *PACKAGES)
    for package in sorted((apt / "archives").glob("*.deb")):
        _run("sh", "-c", 'dpkg-deb --fsys-tarfile "$0" | tar -x -C "$1"', str(package), str(folder))
    shutil.rmtree(apt)
    programs = folder / "usr" / "sbin"
    for name in WITHOUT_ALTERNATIVES:  # a link would do, but daemons that start anew lose its name
        (programs / f"{name}-wlm").rename(programs / name)
    (folder / "usr" / "bin" / "awk").symlink_to("gawk")
    (folder / "usr" / "local").mkdir(exist_ok=True)


def _mirror() -> str:
    """Where this machine gets Debian from."""
    only = ("Created-By: Packages", "Origin: Debian", "Label: Debian", "Component: main")
    found = _run("apt-get", "indextargets", "--format", "$(REPO_URI)", *only).split()
    if not found:
        raise NoRoot("apt has no mirror of Debian in its sources, or `apt-get update` never ran")
    return found[0].decode()


def _run(*command: str) -> bytes:
    """Its output, of both kinds; also in the error, if it fails."""
    none, pipe, both = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT
    return subprocess.run(command, stdin=none, stdout=pipe, stderr=both, check=True).stdout


def main(versions: Sequence[str]) -> int:
    """Make the roots; 1 if one cannot be had."""
    code = 0
    for version in versions or SUITES:
        try:
            root = root_of(version)
        except NoRoot as error:
            print(error, file=sys.stderr)
            code = 1
            continue
        found = told_version(root)
        print(f"{root}: Slurm {found}")
        if not found.startswith(version):
            print(f"Debian {SUITES[version]} has Slurm {found} now, not {version}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
