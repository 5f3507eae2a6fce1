"""Preflight: checks the nodes before an attempt, and chooses which to use."""

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
"""Runs a slow function; None if it was not waited for because of a stop."""


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
    """Have the launcher avoid unfit and suspect nodes, as far as it can.

    The nodes are examined `patiently`, or not if a stop is requested meanwhile. Their clocks are
    compared with `clock`, in seconds since the epoch: the controller's if there is one, since this
    host's own may be wrong."""
    if config.resilience.health_check or config.hooks.before_start:

        def ask(question: ProbeQuestion) -> Answers | None:
            began = time.monotonic()
            results = patiently(lambda: launcher.survey(question))
            if results is not None:
                seconds = round(time.monotonic() - began, 2)
                nodes = len(launcher.nodes.all)
                logger().info("health check", nodes=nodes, answers=len(results), seconds=seconds)
            return results

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
    """The nodes to exclude after a failure on `node`, each with a reason: suspects that no spare
    node can replace.

    Failing first may be chance or the program's fault, so without more evidence it counts only if
    there are other nodes to compare with and the next start is the `last` one. `node` is not blamed
    if a checkpoint could not be written, which rank 0 reports for all, if the environment is at
    fault, which any rank may report, or for a hang without a first rank; then only proven suspects
    are excluded."""
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
    """Ask the nodes, and diagnose their answers; an empty diagnosis if a stop comes first."""
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
            results = ask(question)
            if results is None:
                return Diagnosis({})
            during = (began, clock())
            hidden = {r.node: words for r in results if (words := _unseen(question, r))}
    except OSError as error:
        return Diagnosis({}, (f"{error.filename} cannot be read: {error.strerror}",))
    answered = frozenset(result.node for result in results)
    if config.resilience.health_check:
        return replace(diagnose(nodes, results, hidden, during, ranks), answered=answered)
    troubles = {r.node: r.troubles[SITE_CHECK] for r in results if SITE_CHECK in r.troubles}
    return Diagnosis(troubles, answered=answered)


def _unseen(question: ProbeQuestion, vitals: ProbeResult) -> str:
    """Why the files that a node wrote are not visible on this one; empty if they are."""
    if set(question.folders) & set(vitals.troubles):
        return ""
    folder = next(unseen(question, vitals), None)
    if folder is None:
        return ""
    where = Path(folder).parent
    return f"files that it writes to {where} are not visible on the supervisor's node"
