"""`kempner lab`: a real Slurm cluster of eight nodes on this machine, and faults for it."""

from __future__ import annotations

import os
import shlex
from enum import Enum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from kempner.cli.progress import busy
from kempner.lab import place
from kempner.lab.cluster import Cluster
from kempner.lab.slurm_conf import LOGIN, Options
from kempner.run.process.exit_codes import RunError, UsageError

Folder = Annotated[
    Path | None,
    typer.Option("--dir", metavar="FOLDER", help="Where the lab is, if not in your home."),
]
Job = Annotated[str, typer.Argument(metavar="JOB", help="A job's id.")]
Node = Annotated[str, typer.Argument(metavar="NODE", help="Such as node2.")]


_SLURMD_TIMEOUT = 300  # seconds after which Slurm calls a node down, as on most clusters


_WORDS_OF_A_COMMAND = {"allow_interspersed_args": False, "ignore_unknown_options": True}

app = typer.Typer(rich_markup_mode=None)
commands = typer.Typer(
    help="A Slurm cluster of eight nodes on this machine: try preemption and lost nodes.",
    rich_markup_mode=None,
)
fault = typer.Typer(help="Have something happen to a job or a node.", rich_markup_mode=None)
commands.add_typer(fault, name="fault")
app.add_typer(commands, name="lab")


class NodeNetwork(Enum):
    IB0 = "ib0"
    EM4 = "em4"


@commands.command()
def up(
    nodes: Annotated[int, typer.Option(min=1, max=200, help="How many nodes.")] = 8,
    gpus: Annotated[int, typer.Option(min=0, max=64, help="GPUs of a node, in name only.")] = 4,
    folder: Folder = None,
) -> None:
    """Start a Slurm cluster that stays until `kempner lab down`.

    It takes seconds. The nodes have networks, host names and processes of their own, and share the
    folders of this machine.
    """
    place.check()
    lab = place.claim(_folder(folder), Options(nodes, gpus, slurmd_timeout=_SLURMD_TIMEOUT))
    try:
        with busy("starting the lab"):
            lab.up(tell=typer.echo)
    except RunError as error:
        lab.down()
        logs = f"its logs are in {lab.folder}/log until `{_shown('down', folder)}`"
        raise RunError(f"the lab did not start: {error}; {logs}") from error
    except BaseException:
        place.remove(lab)
        raise
    typer.echo(f"{LOGIN} and node1 to node{nodes} are up, in {lab.folder}. Next:")
    for words, meaning in _NEXT.items():
        typer.echo(f"  {_shown(words, folder):{42 + len(_option(folder))}}{meaning}".rstrip())


_NEXT = {
    "run": f"a shell on {LOGIN}: sbatch, squeue and kempner as on any cluster",
    "run sbatch --nodes=2 job.sh": "one command there",
    "status": "nodes and jobs",
    "fault preempt JOB": "also limit, lose, cut and return",
    "down": "",
}


@commands.command()
def status(folder: Folder = None) -> None:
    """Show where the lab is, its nodes and its jobs."""
    lab = place.find(_folder(folder))
    typer.echo(f"the lab in {lab.folder}: {LOGIN} and {lab.options.nodes} nodes")
    dark = [name for name in lab.options.node_names if not lab.machines[name].up]
    if dark:
        typer.echo(f"without power: {', '.join(dark)}")
    if cut_off := lab.switch.cut_off(lab.machines.values()):
        typer.echo(f"links that are cut: {', '.join(cut_off)}")
    nodes = lab.run(LOGIN, "sinfo", "--partition=low", "--format=%.24N %.12T  %E").stdout
    jobs = lab.run(LOGIN, "squeue", "--format=%.8i %.9P %.20j %.10T %.9M %.9l %.5D %R").stdout
    typer.echo(f"\n{nodes}\n{jobs}".rstrip())


@commands.command(context_settings=_WORDS_OF_A_COMMAND)
def run(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[COMMAND]...", help="A shell if none is given.")
    ] = None,
    folder: Folder = None,
) -> NoReturn:
    """Run a command, or a shell, on the lab's login machine, in this folder.

    Slurm's commands speak to the lab there, and nowhere else.
    """
    lab = place.find(_folder(folder))
    words = command or [os.environ.get("SHELL") or "bash"]
    inside = lab.machines[LOGIN].inside(words, Path.cwd())
    os.execvpe(inside[0], inside, lab.environment_of_user(os.environ))


@commands.command()
def down(folder: Folder = None) -> None:
    """End the lab and everything that runs in it, and remove its folder."""
    lab = place.recorded(_folder(folder))
    with busy("ending the lab"):
        place.remove(lab)
    typer.echo(f"the lab is gone, and {lab.folder} with it")


@fault.command()
def preempt(job: Job, folder: Folder = None) -> None:
    """A job of a higher partition takes the nodes of JOB, which is requeued."""
    lab = place.find(_folder(folder))
    other = lab.preempt(job)
    typer.echo(
        f"job {other} of partition high takes the nodes of job {job} for 10 s; Slurm gives job "
        f"{job} {lab.options.grace} s to leave, and requeues it"
    )


@fault.command()
def limit(
    job: Job,
    minutes: Annotated[int, typer.Argument(min=1, help="From now, rounded up to a full minute.")],
    folder: Folder = None,
) -> None:
    """The time limit of JOB ends in MINUTES."""
    place.find(_folder(folder)).end_in_minutes(job, minutes)
    typer.echo(f"job {job} reaches its time limit in {minutes} to {minutes + 1} minutes")


@fault.command()
def lose(node: Node, folder: Folder = None) -> None:
    """NODE loses its power: its processes end, and the controller hears nothing."""
    lab = _with_node(folder, node)
    lab.power_off(node)
    typer.echo(
        f"{node} has no power; Slurm notices in {lab.options.slurmd_timeout} s at the latest"
    )


@fault.command()
def cut(
    node: Node,
    interface: Annotated[
        NodeNetwork, typer.Option(help="ib0 carries what ranks say, em4 what Slurm says.")
    ] = NodeNetwork.IB0,
    folder: Folder = None,
) -> None:
    """The cable of NODE is pulled: its processes live, and reach no other machine."""
    _with_node(folder, node).cut(node, interface.value)
    typer.echo(f"{interface.value} of {node} is cut")


@fault.command("return")
def bring_back(node: Node, folder: Folder = None) -> None:
    """NODE has power and whole links again."""
    lab = _with_node(folder, node)
    with busy(f"starting {node}"):
        lab.bring_back(node)
    typer.echo(f"{node} is back")


def _folder(given: Path | None) -> Path:
    return (given or place.default_folder(os.environ)).absolute()


def _with_node(folder: Path | None, node: str) -> Cluster:
    lab = place.find(_folder(folder))
    if node not in lab.options.node_names:
        raise UsageError(f"there is no node {node}: the lab has node1 to node{lab.options.nodes}")
    return lab


def _option(folder: Path | None) -> str:
    return f" --dir {shlex.quote(str(folder))}" if folder else ""


def _shown(words: str, folder: Path | None) -> str:
    """The command line for `words` in this lab."""
    first, _, rest = words.partition(" ")
    if first == "fault":
        return f"kempner lab {words}{_option(folder)}"
    return f"kempner lab {first}{_option(folder)} {rest}".rstrip()
