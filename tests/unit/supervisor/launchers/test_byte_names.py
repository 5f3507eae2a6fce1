"""Names that are no UTF-8 on their way to a node and back."""

from __future__ import annotations

import os
from pathlib import Path

from kempner.probe.node import ProbeQuestion, answer_text, question_text, read_result
from kempner.run.control.launch_env import Launch, LaunchTerms
from kempner.run.link.auth import Secret
from kempner.run.link.messages import encode
from kempner.run.process.durable_io import as_names, as_text
from kempner.run.record.attempts import Attempt
from kempner.supervisor.launchers.agents.messages import SealedLaunch, StartRanks, decode_to_agent

LATIN_1 = os.fsdecode(b"/scratch/caf\xe9/\xff/runs")


def test_a_name_that_is_no_text_reaches_an_agent_and_comes_back() -> None:
    assert as_names(as_text({LATIN_1: (LATIN_1, "Gödel")})) == {LATIN_1: (LATIN_1, "Gödel")}
    terms = LaunchTerms(Path(LATIN_1), 60.0, 30.0, 600.0, network='{"gödel":1}')
    secret, control = Secret.new(), Secret.new()
    launch = Launch(Attempt(1, "nonce"), control, terms=terms)
    order = StartRanks(1, SealedLaunch.of(launch, secret), 0, 1, 1, ("node1", 4000))
    heard = decode_to_agent(encode(order))
    assert isinstance(heard, StartRanks)
    assert heard == order
    assert heard.launch.open(secret, 1).terms == terms
    asked = ProbeQuestion("nonce", (LATIN_1,), None, on_one_node=True)
    answer = read_result(answer_text(question_text(asked)))
    assert answer is not None
    assert any(LATIN_1 in text for text in (*answer.disk_free, *answer.troubles))
