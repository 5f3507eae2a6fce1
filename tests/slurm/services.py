"""Commands and services on the lab's machines: munge, the data base, accounting."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness import wait_until
from nodes import Machine
from slurm_conf import LOGIN

PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


class Services:
    """Machines by name, that share a folder, and what runs on them."""

    def __init__(self, folder: Path, names: Sequence[str], root: Path | None = None) -> None:
        """With a `root` of `versions.py`, its Slurm runs on all machines."""
        self.folder = folder
        self.environ: Mapping[str, str] = {
            "PATH": PATH,
            "HOME": os.environ.get("HOME", "/root"),
            "USER": "root",
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "SLURM_CONF": str(folder / "etc" / "slurm.conf"),
            **({} if root is None else {"LAB_ROOT": str(root)}),
        }
        self.machines = {name: Machine(name, folder, self.environ) for name in names}

    def run(
        self,
        machine: str,
        *command: str,
        check: bool = True,
        cwd: Path | None = None,
        timeout: float = 60,
        **environ: str,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a machine to its end; its two outputs are text, stderr in stdout."""
        done = subprocess.run(
            self.machines[machine].inside(command, cwd or self.folder / "jobs"),
            env={**self.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0 or not check, f"{command}: {done.returncode}\n{done.stdout}"
        return done

    def start(
        self, machine: str, *command: str, cwd: Path | None = None, **environ: str
    ) -> subprocess.Popen[str]:
        """Start a command on a machine, with pipes to its input and output."""
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
        """Start a program that puts itself in the background, or stays there with its machine."""
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
        """Wait until `host` answers, as seen from a machine."""
        probe = f"exec 3<>/dev/tcp/{host}/{port}"
        answers = lambda: self.run(machine, "bash", "-c", probe, check=False).returncode == 0  # noqa: E731
        wait_until(answers, f"{host} answers on port {port}", interval=0.05)

    def start_munge(self) -> None:
        """One munged serves all machines: its socket is in the shared folder."""
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
        """A data base of its own, empty, on the login machine."""
        data, socket = self.folder / "db", self.folder / "db.sock"
        # Its temporary tables are named by its process id, which another cluster's may have too.
        (scratch := self.folder / "db.tmp").mkdir()
        self.run(
            LOGIN,
            *("mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={data}"),
            *(f"--tmpdir={scratch}", "--auth-root-authentication-method=normal", "--skip-test-db"),
        )
        self.daemon(
            LOGIN,
            *("mariadbd", "--no-defaults", "--user=root", f"--datadir={data}"),
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
        """slurmdbd, with the cluster, its one account and a QOS that preempts the normal one."""
        self.daemon(LOGIN, "slurmdbd")
        self.await_port(LOGIN, LOGIN, 6819)
        # slurmdbd listens before its tables exist: the first command that works tells.
        listed = lambda: "lab" in self.sacctmgr("-n", "list", "cluster").stdout.split()  # noqa: E731
        added = lambda: self.sacctmgr("add", "cluster", "lab").returncode == 0 or listed()  # noqa: E731
        wait_until(added, "slurmdbd takes the cluster", interval=0.1)
        self.sacctmgr("add", "account", "lab", "cluster=lab")
        self.sacctmgr("add", "user", "root", "account=lab", "cluster=lab", "adminlevel=admin")
        self.sacctmgr("add", "qos", "urgent", "priority=1000", "preempt=normal")
        self.sacctmgr("modify", "account", "lab", "set", "qos+=normal,urgent")

    def sacctmgr(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command of the accounting manager, answered yes."""
        return self.run(LOGIN, "sacctmgr", "-i", *words, check=False)
