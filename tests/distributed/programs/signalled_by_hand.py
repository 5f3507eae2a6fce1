"""docs/examples/by_hand.py; if `signal.json` says so, a process of it gets a signal in a step."""

import json
import os
import signal
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

from kempner.run.process.signals import inbox

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "by_hand.py"
order = json.loads(Path("signal.json").read_text()) if Path("signal.json").exists() else {}
made = 0


def count(*_: object) -> None:
    global made
    made += 1
    if made == order.get("at") and order["rank"] == int(os.environ.get("RANK", 0)):
        number = signal.Signals[order["signal"]]
        os.kill(os.getppid() if order["to_parent"] else os.getpid(), number)
        while not inbox().received:  # a parent may take its time to pass it on
            time.sleep(0.01)


register_optimizer_step_post_hook(count)
exec(compile(EXAMPLE.read_text(), str(EXAMPLE), "exec"))  # runpy would name another command
