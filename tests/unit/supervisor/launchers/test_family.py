"""Who belongs to the ranks of a local attempt, where the supervisor is a container's first process.

What else there is to a family, real supervisors show: ../../../distributed/programs.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kempner.run.control.launch_env import Control, Launch
from kempner.run.control.protocol import Secret
from kempner.run.record.attempts import Attempt

AS_INIT = """
import os, signal, subprocess, sys
from kempner.run.output import logs
from kempner.supervisor.launchers.family import Family
logs.configure()
assert os.getpid() == 1
launch = {name: value for name, value in os.environ.items() if name.startswith("KEMPNER_")}
plain = {name: value for name, value in os.environ.items() if name not in launch}
family = Family()
ours, stranger = (
    subprocess.Popen(["sleep", "100"], env=env, start_new_session=True)
    for env in (plain | launch, plain)
)
family.kill()
print(ours.wait(), stranger.poll())
stranger.kill()
stranger.wait()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="a process namespace needs root")
def test_the_first_process_of_a_container_ends_no_orphans_of_others() -> None:
    launch = Launch(Attempt(1, "abcd"), Control("127.0.0.1", 20_000, Secret.new()))
    inside = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", AS_INIT]
    environ = {**os.environ, **launch.environment()}
    done = subprocess.run(inside, env=environ, capture_output=True, text=True, timeout=100)
    assert done.stdout == "-9 None\n", done.stderr
