"""Commands and services on the lab's machines: munge, the database, accounting."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kempner.lab.machines import Machine, Switch, wait_until
from kempner.lab.slurm_conf import LOGIN, user_name
from kempner.run.process.exit_codes import RunError

PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"

_AS_ROOT = ["--user=root"] if os.geteuid() == 0 else []
"""MariaDB needs this option to run as root, and only root may give it."""


class Services:
    """Machines by name, which share a folder, and the programs on them."""

    patience = 4.0
    """Factor on all timeouts, which are for a quiet machine."""

    def __init__(
        self, folder: Path, names: Sequence[str], root: Path | None = None, bound: bool = False
    ) -> None:
        """With a `root`, all machines use its /usr, and so its Slurm. If `bound`, the machines end
        with this process."""
        self.folder = folder
        self.environ: Mapping[str, str] = {
            "PATH": PATH,
            "HOME": os.environ.get("HOME", "/root"),
            "USER": user_name(),
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "SLURM_CONF": str(folder / "etc" / "slurm.conf"),
            **({} if root is None else {"LAB_ROOT": str(root)}),
        }
        self.switch = Switch(Machine("switch", folder, self.environ, bound=bound))
        host = self.switch.machine
        self.machines = {name: Machine(name, folder, self.environ, host) for name in names}

    def environment_of_user(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The environment of a user's command on a machine of the lab."""
        ours = {name: self.environ[name] for name in ("PATH", "USER", "SLURM_CONF")}
        return {"OMP_NUM_THREADS": "1", **environ, **ours}

    def run(
        self,
        machine: str,
        *command: str,
        check: bool = True,
        cwd: Path | None = None,
        timeout: float = 60,
        **environ: str,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a machine; its stderr is in stdout. Raises `RunError` if it fails,
        unless `check` is False."""
        shown, seconds = " ".join(command), timeout * self.patience
        try:
            done = subprocess.run(
                self.machines[machine].inside(command, cwd or self.folder / "jobs"),
                env={**self.environ, **environ},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired as error:
            raise RunError(f"{shown}: not done within {seconds:.0f} s") from error
        if check and done.returncode:
            raise RunError(f"{shown}: exit code {done.returncode}: {done.stdout.strip()}")
        return done

    def start(
        self, machine: str, *command: str, cwd: Path | None = None, **environ: str
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.machines[machine].inside(command, cwd or self.folder / "jobs"),
            env={**self.environ, **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def daemon(self, machine: str, *command: str) -> subprocess.Popen[bytes]:
        """Start a daemon."""
        with open(self.folder / "log" / f"start.{machine}.{command[0]}.log", "ab") as log:
            return subprocess.Popen(
                self.machines[machine].inside(command, Path("/")),
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def await_port(self, machine: str, host: str, port: int) -> None:
        probe = f"exec 3<>/dev/tcp/{host}/{port}"
        answers = lambda: self.run(machine, "bash", "-c", probe, check=False).returncode == 0  # noqa: E731
        self.wait_until(answers, f"{host} answers on port {port}")

    def wait_until(self, condition: Callable[[], object], what: str, seconds: float = 120) -> None:
        what = f"{what}; the logs are in {self.folder}/log"
        wait_until(condition, what, seconds * self.patience)

    def start_munge(self) -> None:
        """Start one munged for all machines: its socket is in the shared folder."""
        folder = self.folder / "munge"
        (folder / "key").touch(0o600)
        (folder / "key").write_bytes(os.urandom(128))
        self.run(
            LOGIN,
            *("munged", "--force", f"--key-file={folder}/key", f"--socket={folder}/socket"),
            *(f"--pid-file={folder}/pid", f"--seed-file={folder}/seed"),
            f"--log-file={self.folder}/log/munged.log",
        )

    def start_database(self) -> None:
        """Start an empty database on the login machine."""
        data, socket = self.folder / "db", self.folder / "db.sock"
        # Temporary tables are named by process id, which another cluster's database may share.
        (scratch := self.folder / "db.tmp").mkdir()
        self.run(
            LOGIN,
            *("mariadb-install-db", "--no-defaults", *_AS_ROOT, f"--datadir={data}"),
            *(f"--tmpdir={scratch}", "--auth-root-authentication-method=normal", "--skip-test-db"),
        )
        self.daemon(
            LOGIN,
            *("mariadbd", "--no-defaults", *_AS_ROOT, f"--datadir={data}"),
            *(
                f"--tmpdir={scratch}",
                f"--socket={socket}",
                f"--pid-file={self.folder}/db.pid",
                "--bind-address=127.0.0.1",
            ),
            *("--skip-name-resolve", "--skip-log-bin", "--innodb-buffer-pool-size=64M"),
            *("--innodb-flush-log-at-trx-commit=0", "--innodb-lock-wait-timeout=900"),
        )
        self.await_port(LOGIN, "127.0.0.1", 3306)
        statements = (
            "create database slurm_acct_db;"
            "create user 'slurm'@'127.0.0.1' identified by 'lab';"
            "grant all on slurm_acct_db.* to 'slurm'@'127.0.0.1'; flush privileges;"
        )
        self.run(
            LOGIN, "mariadb", "--no-defaults", "-uroot", f"--socket={socket}", "-e", statements
        )

    def start_accounting(self) -> None:
        self.daemon(LOGIN, "slurmdbd")
        self.await_port(LOGIN, LOGIN, 6819)
        # slurmdbd listens before its tables exist, so retry until a command works.

        def added() -> bool:
            listed = "lab" in self.sacctmgr("-n", "list", "cluster").stdout.split()
            return listed or self.sacctmgr("add", "cluster", "lab").returncode == 0

        self.wait_until(added, "slurmdbd takes the cluster")
        self.sacctmgr("add", "account", "lab", "cluster=lab")
        self.sacctmgr("add", "user", user_name(), "account=lab", "cluster=lab", "adminlevel=admin")
        self.sacctmgr("add", "qos", "urgent", "priority=1000", "preempt=normal")
        self.sacctmgr("modify", "account", "lab", "set", "qos+=normal,urgent")

    def sacctmgr(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run(LOGIN, "sacctmgr", "-i", *words, check=False)
