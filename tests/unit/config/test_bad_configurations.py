"""Whatever is wrong with a configuration or a command line is said in one sentence, exit code 2."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kempner.cli.entry import main

FILES = [
    ("[train]\nmax_stepz = 5", "unknown key train.max_stepz; did you mean train.max_steps?"),
    ("[trian]\nmax_steps = 5", "unknown section trian; did you mean train?"),
    ("[run]\nmax_steps = 5", "unknown key run.max_steps; did you mean train.max_steps?"),
    (
        "[train]\ninterval = 5",
        "train.interval ... did you mean checkpoint.interval or eval.interval?",
    ),
    ("max_steps = 5", "unknown section max_steps; did you mean train.max_steps?"),
    ("[zzz]\nkeep_last = 5", "unknown section zzz; did you mean checkpoint.keep_last?"),
    ("[zzz]\nqqq = 1", "unknown section zzz; the sections here are run, model, train"),
    ("[metrics]\nqqqqqq = 1", "unknown key metrics.qqqqqq; the keys here are log_interval"),
    ("[train.zzz]\nqqq = 1", "unknown key train.zzz; the keys here are max_steps, "),
    (
        '[train]\n"max\\nsteps" = 5',
        "unknown key train.max\\nsteps; did you mean train.max_steps?",
    ),
    (
        "[train]\ndeterministic = ture",
        "line 2, column 17 ... true and false are lower case): deterministic = ture",
    ),
    ('[train]\ndeterministic = "true"', 'train.deterministic must be true or false, not "true"'),
    ("[checkpoint]\nasync_save = 1", "checkpoint.async_save must be true or false, not 1"),
    ("[train]\nmax_steps = true", "train.max_steps must be a whole number, not true"),
    ("[train]\nmax_steps = 10.9", "train.max_steps must be a whole number, not 10.9"),
    ("[train]\nmax_steps = 1e3", "train.max_steps must be a whole number, not 1000.0"),
    ('[train]\nmax_steps = "10"', 'train.max_steps must be a whole number, not "10"'),
    ("[train]\nmax_steps = 0", "train.max_steps must be above 0, not 0"),
    ("[checkpoint]\ninterval = -5", "checkpoint.interval must be above 0, not -5"),
    ("[distributed]\ntimeout = -1.5", "distributed.timeout must be above 0, not -1.5"),
    ('[supervise]\ncontrol_ports = "20000-19999"', '="20000-19999" is not a range of ports'),
    ('[supervise]\ncontrol_ports = "0-5"', '="0-5" is not a range of ports'),
    ('[supervise]\ncontrol_ports = "1-65536"', '="1-65536" is not a range of ports'),
    ('[supervise]\ncontrol_ports = "20000"', "supervise.control_ports must match the pattern"),
    ("[supervise]\ncrash_grace = -0.1", "supervise.crash_grace must be at least 0, not -0.1"),
    ("[distributed]\ntimeout = inf", "distributed.timeout must be a finite number, not inf"),
    ("[optimizer]\nlr = nan", "optimizer.lr must be a finite number, not nan"),
    ("[scheduler]\nmin_lr_ratio = 1.5", "scheduler.min_lr_ratio must be at most 1, not 1.5"),
    ("[model]\ndropout = 1", "model.dropout must be below 1, not 1"),
    ("[checkpoint]\nkeep_last = 1", "checkpoint.keep_last must be at least 2, not 1"),
    ("[train]\nseed = 9223372036854775808", "train.seed must be a number of at most 64 bits"),
    ("[train]\nseed = " + "9" * 5000, "not valid TOML ... Exceeds the limit"),
    ("[optimizer]\nbetas = [0.9]", "optimizer.betas must have at least 2 values, not [0.9]"),
    (
        "[optimizer]\nbetas = [0.9, 0.95, 0.99]",
        "optimizer.betas must have at most 2 values, not [0.9, 0.95, 0.99]",
    ),
    ("[optimizer]\nbetas = [0.9, 1.0]", "optimizer.betas[1] must be below 1, not 1.0"),
    ('[optimizer]\nbetas = [0.9, "x"]', 'optimizer.betas[1] must be a number, not "x"'),
    ("[optimizer]\nbetas = 0.9", "optimizer.betas must be a list in square brackets, not 0.9"),
    (
        '[optimizer]\nname = "lion"',
        "optimizer.name must be 'adamw', 'muon' or 'sgd', not \"lion\"",
    ),
    ("[optimizer]\nmomentum = 0.9", '[optimizer] momentum has no effect with name="adamw"; remove'),
    ("[optimizer]\nnesterov = false", 'nesterov has no effect with name="adamw"; remove it'),
    ('[optimizer]\nname = "sgd"\neps = 1e-8', 'eps has no effect with name="sgd"; remove it'),
    (
        '[optimizer]\nname = "sgd"\nbetas = [0.9, 0.95]',
        '[optimizer] betas has no effect with name="sgd"; remove it',
    ),
    (
        '[optimizer]\nname = "sgd"\nnesterov = true\nmomentum = 0.0',
        "[optimizer] nesterov=true needs a momentum above 0",
    ),
    (
        "[checkpoint]\ninterval = 100\nkeep_every = 250",
        "[checkpoint] keep_every=250 must be a multiple of interval=100",
    ),
    (
        '[checkpoint]\naccept_changes = ["world"]',
        "checkpoint.accept_changes[0] must be 'data' or 'seed', not \"world\"",
    ),
    ('[run]\nname = "../x"', 'run.name must match the pattern ... not "../x"'),
    ("[run]\ndir = 5", "run.dir must be a string in quotes, not 5"),
    ("[run]\nname = 2026-01-02", "run.name must be a string in quotes, not 2026-01-02"),
    ('[data]\ndataset_path = "a\\u0000b"', "data.dataset_path must not hold a null character"),
    ("train = 5", "train must be a table of keys, not 5"),
    ("[[train]]\nmax_steps = 5", "train must be a table of keys, not [a table]"),
    ("[train.max_steps]\nx = 1", "train.max_steps must be a whole number, not a table"),
    ("[model]\nn_heads = 3", "[model] dim=256 must be a multiple of n_heads=3"),
    ("[model]\nn_kv_heads = 3", "[model] n_heads=4 must be a multiple of n_kv_heads=3"),
    ("[model]\nhead_dim = 7", "[model] the head width must be even"),
    ("[eval]\ninterval = 5", "[eval] interval needs dataset_path, the held-out tokens"),
    ("[train]\nseq_len = 5000", "train.seq_len=5000 exceeds model.max_seq_len=4096"),
    (
        "[train]\nmax_steps = 0\nseed = -1\nzzz = 1",
        "train.max_steps must be above 0, not 0 ... (and 2 more)",
    ),
    ("[train]\nseed = 1\nseed = 2", "given only once ... seed = 2"),
    ("[train]\n[train]", "line 2 ... Cannot declare"),
    ("[train]\nseed =", "line 2 ... Invalid value ... seed ="),
    ("[train\nseed = 1", "line 1 ... [train"),
    ('[run]\nname = "abc', 'line 2 ... name = "abc'),
    ("train:\n  max_steps: 5\n", "line 1 ... not valid TOML ... train:"),
    ("[train]\n\x00", "line 2 ... not valid TOML"),
    ("x = " + "[" * 10_000, "not valid TOML ... nested"),
    ("[optimizer]\nbetas = " + "[" * 390 + "]" * 390, "optimizer.betas ... not [[...]]"),
    ("[train" + ".deep" * 900 + "]", "unknown key train.deep; the keys here are max_steps"),
    (f"{500 * 'x'} = 1", "unknown section xxx ... x...; the sections here"),
    ("[run]\n# M\xfcller".encode("latin-1"), "line 2 ... not UTF-8"),
    ("[run]".encode("utf-16"), "line 1 ... not UTF-8"),
    (b"#" * (1 << 21), "larger than 1 MiB"),
    (
        f'[train]\nmax_steps = "{500 * "x"}"',
        'train.max_steps must be a whole number ... not "xxxx ... ...',
    ),
]

ARGUMENTS = [
    (
        "",
        ["--train.max_stepz=5"],
        "--train.max_stepz=5: unknown key ... did you mean train.max_steps?",
    ),
    ("", ["--train.max-steps=5"], "--train.max-steps=5 ... did you mean train.max_steps?"),
    ("", ["--trian.max_steps=5"], "--trian.max_steps=5 ... did you mean train.max_steps?"),
    ("", ["--keep_last=5"], "--keep_last=5 ... did you mean checkpoint.keep_last?"),
    ("", ["--model.seq_len=5"], "--model.seq_len=5: unknown key ... did you mean train.seq_len?"),
    (
        "",
        ["--model.dim.x=5"],
        "--model.dim.x=5: unknown key model.dim.x; did you mean model.dim?",
    ),
    (
        "",
        ["--train..seed=5"],
        "--train..seed=5: unknown key train..seed; did you mean train.seed?",
    ),
    ("", ["--zzz.qqq=5"], "--zzz.qqq=5: unknown section zzz; the sections are run, model"),
    (
        "",
        ["--trian.max_stepz=5"],
        "--trian.max_stepz=5: unknown key ... did you mean train.max_steps?",
    ),
    ("", ["--=5"], 'argument "--=5" is not understood'),
    ("", ["--train=5"], "--train=5: train is a section ... --train.max_steps=VALUE"),
    ("", ["--train={seed = 5}"], "train is a section ... --train.max_steps=VALUE"),
    (
        "",
        ["--train.deterministic=ture"],
        '--train.deterministic=ture: train.deterministic must be true or false, not "ture"',
    ),
    ("", ["--train.deterministic=True"], 'train.deterministic must be true or false, not "True"'),
    (
        "",
        ["--train.max_steps=10.9"],
        "--train.max_steps=10.9: train.max_steps must be a whole number, not 10.9",
    ),
    ("", ['--train.max_steps="10"'], 'train.max_steps must be a whole number, not "10"'),
    ("", ["--train.max_steps=5 # few"], 'train.max_steps must be a whole number, not "5 # few"'),
    (
        "",
        ["--train.max_steps=5\nseed = 3"],
        'train.max_steps must be a whole number, not "5\\nseed = 3"',
    ),
    ("", ["--train.max_steps=5, 6"], 'train.max_steps must be a whole number, not "5, 6"'),
    (
        "",
        ["--optimizer.betas=0.9,0.95"],
        'optimizer.betas must be a list in square brackets, not "0.9,0.95"',
    ),
    (
        "",
        ["--optimizer.betas=[0.9,0.95"],
        'optimizer.betas must be a list in square brackets, not "[0.9,0.95"',
    ),
    ("", ['--run.name="abc'], '--run.name="abc ... run.name has an unclosed quote'),
    (
        "",
        ["--run.name=7"],
        "--run.name=7: run.name must be a string in quotes, not 7 ... --run.name='\"7\"'",
    ),
    (
        "",
        ["--run.name=2026-01-02"],
        "--run.name=2026-01-02: run.name must be a string in quotes, not 2026-01-02",
    ),
    (
        "",
        ["--supervise.stop_grace=-5"],
        "--supervise.stop_grace=-5 ... supervise.stop_grace must be above 0, not -5",
    ),
    (
        "",
        ["--scheduler.name=cosin"],
        "--scheduler.name=cosin ... scheduler.name must be 'cosine', 'linear' ... \"cosin\"",
    ),
    ("", ["--data.dataset_path="], "--data.dataset_path=: no value ... --data.dataset_path=VALUE"),
    (
        "",
        ["--train.max_steps"],
        'argument "--train.max_steps" has no value ... --section.key=value',
    ),
    ("", ["--train.max_steps", "5"], "join the two words: --train.max_steps=5"),
    (
        "",
        ["train.max_steps=5"],
        'argument "train.max_steps=5" is not understood ... --section.key=value',
    ),
    (
        "",
        ["-train.max_steps=5"],
        'argument "-train.max_steps=5" is not understood ... --section.key=value',
    ),
    ("", ["other.toml"], 'argument "other.toml" is not understood'),
    (
        "",
        ["--train.max_steps=5", "--train.max_steps=6"],
        "--train.max_steps=6: train.max_steps is set twice ... --train.max_steps=5",
    ),
    (
        "[model]\nn_heads = 3\ndim = 384\n",
        ["--model.dim=256"],
        "with --model.dim=256: [model] dim=256 must be a multiple of n_heads=3",
    ),
    ("train = 5", ["--train.max_steps=5"], "train must be a table of keys, not 5"),
    ("", ["--data.dataset_path=a\udcff"], "=a\\udcff: data.dataset_path must be valid UTF-8"),
    (
        "",
        ["--data.dataset_path=a\x00b"],
        "=a\\x00b: data.dataset_path must not hold a null character",
    ),
    ("", ["--train.dtype=a\nb\u2028c"], "--train.dtype=a\\nb\\u2028c: train.dtype must be"),
]


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command says on stderr, once it has failed as a user's error has to fail."""
    with pytest.raises(SystemExit) as left:
        main(arguments)
    captured = capsys.readouterr()

    assert left.value.code == 2
    assert captured.out == ""
    assert captured.err.startswith("kempner: ")
    assert len(captured.err.splitlines()) == 1
    assert captured.err.endswith("\n")
    assert "Traceback" not in captured.err
    assert len(captured.err) < 500
    return captured.err


def say(sentence: str, words: str) -> bool:
    """Whether the sentence holds the words; three dots stand for anything between them."""
    return re.search(".*".join(map(re.escape, words.split(" ... "))), sentence) is not None


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "debug.toml"


@pytest.mark.parametrize(("content", "words"), FILES, ids=[words[:60] for _, words in FILES])
def test_a_bad_file_is_named_with_the_culprit(
    content: str | bytes, words: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path.write_bytes(content.encode() if isinstance(content, str) else content)

    sentence = refusal(capsys, "config", "check", str(path))

    assert sentence.startswith(f"kempner: {path}")
    assert say(sentence, words), sentence
    assert refusal(capsys, "config", "show", str(path)) == sentence


@pytest.mark.parametrize(
    ("content", "arguments", "words"), ARGUMENTS, ids=[words[:60] for _, _, words in ARGUMENTS]
)
def test_a_bad_override_is_named_with_the_culprit(
    content: str,
    arguments: list[str],
    words: str,
    path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path.write_text(content)

    sentence = refusal(capsys, "config", "check", str(path), *arguments)

    assert say(sentence, words), sentence


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("trian",), "No such command 'trian'"),
        (("--frobnicate",), "No such option: --frobnicate"),
        (("supervise",), "name a configuration, or a command after"),
        (("supervise", "x.toml", "--nproc", "0"), "Invalid value for '--nproc'"),
        (("supervise", "x.toml", "--nproc"), "Option '--nproc' requires an argument"),
        (("supervise", "x.toml", "--launcher=pbs"), "Invalid value for '--launcher'"),
        (("checkpoint", "verify"), "Missing argument"),
        (("prepare", "x.txt"), "Missing option '--out'"),
        (("config",), "Missing command"),
        (("config", "chek"), "No such command 'chek'"),
        (("config", "check"), "Missing argument 'CONFIG'"),
        (("config", "schema", "surplus"), "surplus"),
        (("config", "check", "no/such.toml"), "no/such.toml does not exist"),
        (("config", "check", ""), "is a directory"),
        (("config", "check", "/"), "/ is a directory"),
        (("config", "check", "/dev/null/x.toml"), "/dev/null/x.toml cannot be read: Not a dir"),
        (("config", "check", "a\0b"), "embedded null"),
        (("config", "check", "x" * 300), "cannot be read: File name too long"),
        (("config", "check", "--train.seed=5", "x.toml"), "--train.seed=5 comes where the conf"),
    ],
)
def test_a_bad_command_line_is_refused(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(capsys, *arguments)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs Linux's /proc")
def test_a_file_that_opens_and_does_not_read_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sentence = refusal(capsys, "config", "check", "/proc/self/mem")

    assert "/proc/self/mem cannot be read: Input/output error" in sentence


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_without_permission_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "secret.toml"
    path.touch(mode=0)

    assert f"{path} cannot be read: Permission denied" in refusal(
        capsys, "config", "check", str(path)
    )


def test_a_file_name_that_cannot_name_a_run_asks_for_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my run.toml"
    path.touch()

    sentence = refusal(capsys, "config", "check", str(path))

    assert f"{path}: " in sentence
    assert "set run.name, such as --run.name=my-run" in sentence


@pytest.mark.parametrize(
    ("command", "content", "argument", "said"),
    [
        ("config check", "[train]\nmax_stepz = 5", None, "did you mean train.max_steps?"),
        ("config check", "", b"--run.dir=\xff", "run.dir must be valid UTF-8"),
        ("train", "", "--train.deterministic=ture", "train.deterministic must be true or false"),
        (
            "train",
            "[eval]\ninterval = 5",
            None,
            "[eval] interval needs dataset_path, the held-out tokens",
        ),
        ("supervise", "train = 5", None, "train must be a table of keys, not 5"),
        ("supervise", "", "surplus.toml", 'argument "surplus.toml" is not understood'),
    ],
)
def test_every_command_that_takes_a_configuration_says_the_same(
    command: str, content: str, argument: str | bytes | None, said: str, path: Path
) -> None:
    path.write_text(content)
    installed = Path(sys.executable).with_name("kempner")
    overrides = [argument] if argument is not None else []

    done = subprocess.run(
        [installed, *command.split(), path, *overrides],
        cwd=path.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 2
    assert done.stdout == ""
    assert said in done.stderr
    assert done.stderr.startswith("kempner: ")
    assert len(done.stderr.splitlines()) == 1
    assert list(path.parent.iterdir()) == [path]
