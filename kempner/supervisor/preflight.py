"""Preflight: checks the nodes before an attempt, and chooses those to use."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from kempner.config.sections import Config
from kempner.probe.node import (
    SITE_CHECK,
    ProbeQuestion,
    ProbeResult,
    SiteCheck,
    marked,
    unseen,
)
from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import ExitCode
from kempner.run.record.attempts import Attempt
from kempner.run.record.events import NodeSuspected
from kempner.run.record.history import RunHistory
from kempner.run.record.ledger import Ledger
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.hooks import about_run
from kempner.supervisor.launchers.launcher import Launcher
from kempner.supervisor.nodes.exclusion import Diagnosis, diagnose, known_suspects
from kempner.supervisor.policy.outcome import Decision

Answers: TypeAlias = Sequence[ProbeResult]
Patiently: TypeAlias = Callable[[Callable[[], Answers]], Answers | None]
"""Does something slow; None if it was left to itself because of a stop."""


def choose_nodes(
    launcher: Launcher,
    attempt: Attempt,
    run: RunDirectory,
    config: Config,
    ledger: Ledger,
    history: RunHistory,
    patiently: Patiently,
    clock: Callable[[], float] = time.time,
) -> None:
    """Have the launcher do without nodes that are unfit or suspect, as far as it can.

    The nodes are waited for `patiently`, and are not examined if a stop is asked for meanwhile.
    Theirs are compared with the `clock`, in seconds since the epoch: the controller's, if there is
    one, for this host's may be the one that is wrong."""
    if config.resilience.health_check or config.hooks.before_start:

        def ask(question: ProbeQuestion) -> Answers | None:
            began = time.monotonic()
            told = patiently(lambda: launcher.survey(question))
            if told is not None:
                seconds = round(time.monotonic() - began, 2)
                nodes = len(launcher.nodes.all)
                logger().info("health check", nodes=nodes, answers=len(told), seconds=seconds)
            return told

        ranks = launcher.nodes.allocation.size
        found = examine(launcher.nodes.all, ask, ranks, attempt, run, config, clock)
        for warning in found.warnings:
            logger().warning(f"health check: {warning}")
        for node, reason in found.unfit.items():
            ledger.record(NodeSuspected(node, reason), attempt.number)
    suspected = known_suspects(history, config.resilience, config.run.name or "")
    launcher.nodes.avoid({node: suspect.reason for node, suspect in suspected.items()})


def nodes_to_exclude(
    launcher: Launcher,
    node: str,
    history: RunHistory,
    config: Config,
    decision: Decision,
    last: bool,
) -> dict[str, str]:
    """Nodes without which an attempt that failed on `node` had better be made, each with a reason.

    No spare node could take their place. That a node's ranks fail first may be chance, or the
    program's own fault: that alone is a reason only where there are other nodes to compare it with,
    and the next start is the `last` one. Where a checkpoint could not be written, rank 0 says so
    for all; where the nodes do not fit together, any rank; of a hang that none began, none does."""
    suspected = known_suspects(history, config.resilience, config.run.name or "")
    used = launcher.nodes.unavoidable(suspected)
    began_by_none = decision.code is ExitCode.HUNG and not node
    if decision.code is ExitCode.CHECKPOINT_FAILED or decision.environment or began_by_none:
        return {name: suspected[name].reason for name in used if suspected[name].proven}
    by_habit = last and len(launcher.nodes.all) > 1
    if node not in used or not (suspected[node].proven or by_habit):
        return {}
    return {node: suspected[node].reason}


def examine(
    nodes: Sequence[str],
    ask: Callable[[ProbeQuestion], Answers | None],
    ranks: int,
    attempt: Attempt,
    run: RunDirectory,
    config: Config,
    clock: Callable[[], float],
) -> Diagnosis:
    """What is wrong with nodes by what they answer, if they are asked before a stop comes."""
    folders = [run.attempt(attempt.number) / "health"]
    if config.checkpoint.dir is not None:
        folders.append(Path(config.checkpoint.dir) / f".health-{attempt.nonce}")
    nonce, command = secrets.token_hex(8), config.hooks.before_start
    facts = {**about_run(run, attempt.number), "KEMPNER_EVENT": "before_start"}
    question = ProbeQuestion(
        nonce=nonce,
        folders=tuple(str(folder.absolute()) for folder in folders),
        interface=config.distributed.interface,
        on_one_node=len(nodes) == 1,
        site_check=SiteCheck(command, config.hooks.timeout, facts) if command else None,
    )
    try:
        with marked(folders, nonce) as unwritable:
            for folder, why in unwritable.items():
                return Diagnosis({}, (f"{folder} cannot be written: {why}",))
            began = clock()
            told = ask(question)
            if told is None:
                return Diagnosis({})
            during = (began, clock())
            hidden = {vitals.node: words for vitals in told if (words := _unseen(question, vitals))}
    except OSError as error:
        return Diagnosis({}, (f"{error.filename} cannot be read: {error.strerror}",))
    answered = frozenset(vitals.node for vitals in told)
    if config.resilience.health_check:
        return replace(diagnose(nodes, told, hidden, during, ranks), answered=answered)
    troubles = {v.node: v.troubles[SITE_CHECK] for v in told if SITE_CHECK in v.troubles}
    return Diagnosis(troubles, answered=answered)


def _unseen(question: ProbeQuestion, vitals: ProbeResult) -> str:
    """Why what a node wrote has not come to this one; empty if all of it has."""
    if set(question.folders) & set(vitals.troubles):
        return ""
    folder = next(unseen(question, vitals), None)
    if folder is None:
        return ""
    where = Path(folder).parent
    return f"files that it writes to {where} are not visible on the supervisor's node"
