"""Who belongs to the ranks of a local attempt, and who is asked to stop.

What else there is to a family, real supervisors show: ../../../distributed/programs.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from patience import scaled

from kempner.run.control.launch_env import Launch
from kempner.run.link.auth import Secret
from kempner.run.record.attempts import Attempt

AS_INIT = """
import os, signal, subprocess, sys
from kempner.run.output import logs
from kempner.supervisor.launchers.children import Family
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
    launch = Launch(Attempt(1, "abcd"), Secret.new())
    inside = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", AS_INIT]
    environ = {**os.environ, **launch.environment()}
    done = subprocess.run(inside, env=environ, capture_output=True, text=True, timeout=scaled(100))
    assert done.stdout == "-9 None\n", done.stderr


TRAPS = """
import signal
signal.signal(signal.SIGTERM, lambda *_: None)
print("ready", flush=True)
while True:
    signal.pause()
"""

ASKED = """
import subprocess, sys
import psutil
from kempner.supervisor.launchers.children import Family
family, terminate = Family(), psutil.Process.terminate
wrapper = ["bash", "-c", '"$0" -c "$1"; echo end', sys.executable, sys.argv[1]]
top = subprocess.Popen(wrapper, stdout=subprocess.PIPE, text=True, start_new_session=True)
assert top.stdout.readline() == "ready\\n"
def watched(process):
    print(process.pid == top.pid, family.stops())
    terminate(process)
psutil.Process.terminate = watched
family.ask_to_stop()
print(top.wait(), family.stops())
family.kill()
print(family.stops())
"""


def test_the_program_in_a_wrapper_is_known_before_the_wrapper_ends() -> None:
    asked = [sys.executable, "-c", ASKED, TRAPS]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=scaled(100))
    assert done.stdout == "True True\nFalse True\n-15 True\nFalse\n", done.stderr
