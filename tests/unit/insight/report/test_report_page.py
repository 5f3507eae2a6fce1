"""The report's page: in a real browser, for people who see only that, and on the command line."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from browser import Browser, chromium
from planted_run import PlantedRun
from typer.testing import CliRunner

from kempner.cli.app import app
from kempner.insight.report.page.document import page, story
from kempner.insight.report.page.tables import interruption_table, time_table
from kempner.insight.report.page.words import TimeUnit, duration, share, text
from kempner.insight.report.summary import read_run
from kempner.run.process.exit_codes import UsageError

HOSTILE = '<img src=x onerror="window.pwned=1"></script><script>window.pwned=2</script>\'&\x07'


LONG = "a-very-long-name-of-a-run" * 4


def eventful(path: Path) -> PlantedRun:
    """A run that met with nearly everything, and messages that try to be markup."""
    run = PlantedRun(path)
    run.begin()
    run.steps(60)
    run.save()
    run.steps(30)
    run.evaluate()
    run.fail()
    run.ledger[-2]["raised"] = HOSTILE
    run.tell("suspect", node=HOSTILE, reason=HOSTILE * 3)
    run.go_on_from(60, again=30)
    run.steps(40)
    run.hang(120.0)
    run.go_on_from(60, again=70)
    run.steps(20)
    run.stop("preemption")
    run.tell("requeued", step=150, job="7")
    run.spend("queue", 300.0)
    run.begin()
    run.spend("storage", 60.0)
    run.tell("storage_waited", seconds=60.0, rank=2, what=HOSTILE, tries=9)
    run.steps(50)
    run.complete()
    return run


def write_page(folder: Path, *runs: PlantedRun) -> Path:
    file = folder / "report.html"
    file.write_text(page([read_run(run.write()) for run in runs], "1.2.3"))
    return file


WIDER = """[...document.querySelectorAll('body *')].filter(e => !e.closest('.wide') &&
    e.getBoundingClientRect().right > WIDTH + 1).map(e => e.outerHTML.slice(0, 80))"""

DRAWN = """[...document.querySelectorAll('canvas')].map(canvas => {
    const { width, height } = canvas;
    const pixels = canvas.getContext('2d').getImageData(0, 0, width, height).data;
    return new Set(new Uint32Array(pixels.buffer)).size; })"""


def check(browser: Browser, file: Path, width: int, dark: bool, plots: int) -> None:
    browser.open(file, width, dark)
    place = f"{width} px, {'dark' if dark else 'light'}"
    assert browser.errors == [], place
    assert {url.partition(":")[0] for url in browser.requests} <= {"file", "data"}, place
    assert browser.value(WIDER.replace("WIDTH", str(width))) == [], place
    assert browser.value("document.documentElement.scrollWidth") <= width, place
    colours = browser.value(DRAWN)
    assert len(colours) == plots, place
    assert min(colours) > 10, place  # axes, lines, marks, and the shades between them
    back = browser.value("getComputedStyle(document.body).backgroundColor")
    red = int(re.findall(r"\d+", back)[0])
    assert (red < 64) is dark
    assert browser.value("window.pwned") is None
    assert browser.value("document.querySelectorAll('img').length") == 0


def test_in_a_browser(tmp_path: Path) -> None:
    run, other = eventful(tmp_path / "llama"), eventful(tmp_path / LONG)
    one = write_page(tmp_path, run)
    (tmp_path / "both").mkdir()
    both = write_page(tmp_path / "both", run, other)
    with chromium(tmp_path / "profile") as browser:
        for width in (1280, 375):
            for dark in (False, True):
                check(browser, one, width, dark, plots=3)
            check(browser, both, width, False, plots=3)
        browser.call("Emulation.setEmulatedMedia", media="print")
        assert browser.value("getComputedStyle(document.body).backgroundColor") == (
            "rgb(255, 255, 255)"
        )
        browser.call("Emulation.setEmulatedMedia", media="")
        browser.call("Emulation.setScriptExecutionDisabled", value=True)
        browser.open(one, 1280, dark=False)
        said = browser.value("document.body.innerText")
    for sentence in ("Where the time went", "rank 3 was killed by SIGKILL", HOSTILE[:30], "n2"):
        assert sentence in said
    assert "5 min" in re.sub(r"\s+", " ", said)  # in the queue


def test_a_message_is_text_and_nothing_else(tmp_path: Path) -> None:
    html = write_page(tmp_path, eventful(tmp_path / "run")).read_text()
    assert "<img" not in html
    assert html.count("</script>") == 3
    assert text('<a b="\x1b">') == "&lt;a b=&quot;\N{REPLACEMENT CHARACTER}&quot;&gt;"


def words(html: str) -> str:
    """What a person reads of it, on one line."""
    return re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", html))


def test_the_story_says_what_happened(tmp_path: Path) -> None:
    report = eventful(tmp_path / "run").report()
    told = words(story(report))
    assert told.startswith("Completed after ")
    assert " on 4 ranks (2 nodes): step 200" in told
    assert re.search(r"3 interruptions \(1 failure, 1 hang, 1 stop\) cost [\d.]+ GPU minutes", told)


def test_one_machine_without_slurm_is_one_node(tmp_path: Path) -> None:
    run = PlantedRun(tmp_path / "run")
    run.begin()
    run.steps(5)
    run.complete()
    for event in run.ledger:
        event.pop("nodes", None)
        event.pop("job", None)
    assert "on 4 ranks (1 node)" in words(story(run.report()))
    run.ledger[0]["launcher"] = "torchrun"  # on who knows how many
    assert "on 4 ranks: step 5" in words(story(run.report()))


def test_a_hang_is_told_in_seconds_that_agree(tmp_path: Path) -> None:
    """It begins with the last step; the supervisor counts from the last sign that it got."""
    run = PlantedRun(tmp_path / "run")
    run.begin()
    run.steps(5)
    run.hang(11.0)
    told = words(interruption_table(run.report()))
    assert "hung 11 s since the last step (11 s until that was a hang), " in told
    (hang,) = (line for line in run.ledger if line["event"] == "hang")
    hang |= {"seconds": 9.0, "evidence_seconds": 2.5}
    told = words(interruption_table(run.report()))
    assert (
        "hung 11 s since the last step (2 s until the last sign of a rank, 6.5 s until that was a "
        "hang, 2.5 s for its evidence), "
    ) in told
    hang["seconds"] = None  # as older ledgers have it
    assert "hung 11 s, " in words(interruption_table(run.report()))


def test_rounding_is_no_time_that_went_anywhere(tmp_path: Path) -> None:
    run = PlantedRun(tmp_path / "run")
    run.begin()
    run.steps(5)
    run.complete()
    report = run.report()
    seconds = {**report.time.seconds, "unaccounted": 2.4e-7}
    told = words(time_table(replace(report, time=replace(report.time, seconds=seconds))))
    assert "no record says what happened then 0 s 0.0 % 0 " in told


def test_where_it_happened_has_its_names(tmp_path: Path) -> None:
    run = PlantedRun(tmp_path / "run")
    run.begin()
    run.steps(5)
    run.fail()
    assert " rank 3, node n2 " in words(interruption_table(run.report()))


def test_the_timeline_says_what_its_marks_and_heights_mean(tmp_path: Path) -> None:
    run = eventful(tmp_path / "run")
    told = legend(run)
    assert "something failed or hung, a stop was asked for; numbers as in the table" in told
    assert "the height of a colour in it is its share of that time" in told
    calm = PlantedRun(tmp_path / "calm")
    calm.begin(start=350.0, load=30.0, warm_up=0.0)
    calm.steps(10)
    calm.complete(0.0)
    assert legend(calm).strip().startswith("A column is 1 s wide")
    stopped = PlantedRun(tmp_path / "stopped")
    stopped.begin()
    stopped.stop()
    told = legend(stopped)
    assert "a stop was asked for" in told
    assert "failed" not in told


def legend(run: PlantedRun) -> str:
    html = page([read_run(run.write())], "1.2.3")
    (found,) = re.findall('<p class="legend">(.*?)</p>', html)
    return words(found)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (0.0123, "0.012 s"),
        (59.7, "60 s"),
        (60, "1 min"),
        (61, "1 min 1 s"),
        (3600, "1 h"),
        (90000, "1 d 1 h"),
        (None, "-"),
    ],
)
def test_durations(seconds: float | None, words: str) -> None:
    assert duration(seconds) == words


def test_numbers_that_are_nearly_nothing_or_all() -> None:
    assert [share(part) for part in (0, 0.0004, 0.5, 0.9996, 1)] == [
        "0.0 %",
        "< 0.1 %",
        "50.0 %",
        "> 99.9 %",
        "100.0 %",
    ]
    assert [TimeUnit("GPU hours", 1.0).show(value) for value in (0, 0.0004, 1.234, 12345.6)] == [
        "0",
        "< 0.001",
        "1.23",
        "12,346",
    ]


@pytest.mark.parametrize(
    ("seconds", "name", "shown"),
    [
        (158.0, "rank seconds", "158"),
        (601.0, "rank minutes", "10"),
        (7200.0, "rank minutes", "120"),
        (36_000.0, "rank hours", "10"),
        (3.6e9, "rank hours", "1,000,000"),
        (0.0, "rank seconds", "0"),
    ],
)
def test_time_on_all_ranks_has_a_unit_that_fits(seconds: float, name: str, shown: str) -> None:
    unit = TimeUnit.fit(seconds / 3600, "rank")
    assert (unit.name, unit.show(seconds / 3600)) == (name, shown)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = eventful(tmp_path / "run").write()
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["report", "run"])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("report.html: run: completed, goodput ")
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    done = CliRunner().invoke(app, ["report", "--json", "run", str(run.path)])
    both = json.loads(done.output)
    assert [one["name"] for one in both] == ["run", "run"]
    assert sum(both[0]["time"]["seconds"].values()) == pytest.approx(both[0]["wall_seconds"])
    done = CliRunner().invoke(app, ["report", "run", "--output", str(tmp_path / "no" / "file")])
    assert isinstance(done.exception, UsageError)
    assert "--output" in str(done.exception)
