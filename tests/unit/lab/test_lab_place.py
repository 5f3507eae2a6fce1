"""A lab is found by its folder, and by no name; what is none is left alone."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from patience import scaled

from kempner.cli.entry import main
from kempner.lab import place
from kempner.lab.slurm_conf import Options
from kempner.run.process.exit_codes import ExitCode, UsageError
from kempner.run.process.whereabouts import start_ticks

HERE = {"host": "laptop", "boot": "a", "space": "1"}


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"HOME": "/home/me"}, "/home/me/.local/state/kempner/lab"),
        ({"HOME": "/home/me", "XDG_STATE_HOME": "/state"}, "/state/kempner/lab"),
    ],
)
def test_it_is_where_a_desktop_keeps_its_state(environ: Mapping[str, str], folder: str) -> None:
    assert place.default_folder(environ) == Path(folder)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (HERE, ""),
        (HERE | {"boot": "b"}, ""),
        (HERE | {"space": "2"}, "from a container or its own machines"),
        (HERE | {"space": "2", "host": "login1"}, "from a container or its own machines"),
        (HERE | {"boot": "b", "host": "desktop"}, "is on desktop"),
    ],
    ids=["here", "before a reboot", "container", "its own machine", "another host"],
)
def test_it_is_used_where_it_was_started(record: Mapping[str, str], said: str) -> None:
    found = place.elsewhere(record, HERE)
    assert said in found
    assert bool(said) == bool(found)


@pytest.mark.parametrize(
    ("folder", "said"),
    [("with space", "cannot be the folder of a lab"), ("x" * 90, "cannot be the folder of a lab")],
)
def test_a_folder_that_slurm_cannot_name_is_refused(folder: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        place.claim(tmp_path / folder, Options())
    assert not (tmp_path / folder).exists()


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short name."""
    return tmp_path_factory.mktemp("l") / "lab"


def test_a_folder_with_other_things_is_left_alone(folder: Path) -> None:
    folder.mkdir()
    (folder / "thesis.tex").touch()
    with pytest.raises(UsageError, match="is not empty, and no lab"):
        place.claim(folder, Options())
    with pytest.raises(UsageError, match="there is no lab"):
        place.recorded(folder)
    assert (folder / "thesis.tex").exists()


def test_one_that_is_up_is_found_and_refuses_another(folder: Path) -> None:
    claimed = place.claim(folder, Options(nodes=3, gpus=0))
    with pytest.raises(UsageError, match="has ended"):
        place.find(folder)
    (folder / "machines").mkdir()
    switch = subprocess.Popen(["sleep", "infinity"])
    try:
        record = folder / "machines" / "switch"
        record.write_text(f"{switch.pid} {start_ticks(switch.pid)}")
        assert place.find(folder).options == claimed.options == Options(nodes=3, gpus=0)
        with pytest.raises(UsageError, match="a lab is up"):
            place.claim(folder, Options())
        record.write_text(f"{switch.pid} {(start_ticks(switch.pid) or 0) + 1}")
        with pytest.raises(UsageError, match="has ended"):
            place.find(folder)
        place.remove(place.recorded(folder))
        assert switch.poll() is None  # another process that has the id of one that ended
    finally:
        switch.kill()
        switch.wait(scaled(10))
    assert not folder.exists()


def test_after_a_reboot_no_recorded_process_is_believed(folder: Path) -> None:
    place.claim(folder, Options())
    record = json.loads((folder / "lab.json").read_text())
    (folder / "lab.json").write_text(json.dumps(record | {"boot": "another"}))
    (folder / "machines").mkdir()
    (folder / "machines" / "switch").write_text(f"{os.getpid()} {start_ticks(os.getpid())}")
    assert not place.recorded(folder).switch.machine.up
    assert place.claim(folder, Options(nodes=2)).options.nodes == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["status"], "no lab is up in"),
        (["run", "squeue", "--me"], "no lab is up in"),
        (["fault", "lose", "node2"], "no lab is up in"),
        (["down"], "there is no lab in"),
        (["fault", "cut"], "NODE is missing"),
        (["up", "--nodes", "0"], "--nodes must be at least 1"),
    ],
)
def test_a_mistake_is_said_in_one_sentence(
    words: list[str],
    said: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    with pytest.raises(SystemExit) as ended:
        main(["lab", *words])
    assert ended.value.code == ExitCode.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
