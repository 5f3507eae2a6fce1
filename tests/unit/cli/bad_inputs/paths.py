"""Paths that lead nowhere, or to something else, in every place of every command."""

from __future__ import annotations

from bad_inputs import FOLDER, LONG, Link, Row

NAME_ANOTHER = "name a run's directory, the folder that contains its"
NO_CHECKPOINT = f"contains no checkpoint; {NAME_ANOTHER}"
NO_RUN = "is not a run: it has no ledger.jsonl; name <run.dir>/<run.name>, or a job id"
LOOP = "loop cannot be a path: Too many levels of symbolic links"
TOO_LONG = "nnn... cannot be a path: File name too long"
NO_HOME = "the home folder ~nobody-here is unknown; write ./~nobody-here"

CHECKPOINT_COMMANDS = (
    "checkpoint list {}",
    "checkpoint verify {}",
    "checkpoint prune {} --keep-last 1",
    "checkpoint export {} --format dcp --out out",
    "compare run {}",
)
CHECKPOINT_PLACES = {
    "missing": f"missing does not exist; {NAME_ANOTHER}",
    "file": f"file {NO_CHECKPOINT}",
    "folder": f"folder {NO_CHECKPOINT}",
    "x.toml": f"x.toml {NO_CHECKPOINT}",
    "dangling": f"dangling {NO_CHECKPOINT}",
    "/dev/null": f"/dev/null {NO_CHECKPOINT}",
    "file/below": f"file/below does not exist; {NAME_ANOTHER}",
    "loop": LOOP,
    LONG: TOO_LONG,
    "'~nobody-here/run'": NO_HOME,
}

CHECKPOINTS = [
    Row(command.format(place), words)
    for command in CHECKPOINT_COMMANDS
    for place, words in CHECKPOINT_PLACES.items()
]

INIT = [
    Row("init file", "file is not a folder; name a new or an empty one"),
    Row("init run", "run is not empty"),
    Row("init /dev/null", "/dev/null is not a folder"),
    Row("init file/below", "file cannot be written: Not a directory"),
    Row("init loop", LOOP),
    Row(f"init {LONG}", TOO_LONG),
    Row("init '~nobody-here/project'", NO_HOME),
    Row("init ''", "an argument after init is empty"),
    Row("init a b", "b"),
    Row("init --force a", "unknown option --force (see kempner init -h)"),
    Row("initt", "did you mean kempner init?"),
    Row("init /proc/project", "/proc/project", code=2),
]

STATUS = [
    *(
        Row(f"status {place}", f"{place} {NO_RUN}")
        for place in ("missing", "file", "folder", "x.toml", "dangling", "/dev/null", "file/below")
    ),
    Row("status loop", LOOP),
    Row(f"status {LONG}", TOO_LONG),
    Row("status '~nobody-here/run'", NO_HOME),
    Row(("status", "a\0b"), "cannot be a path: embedded null"),
    Row(("status", "a\udcffb\n"), r"a\udcffb\n is not a run"),
    Row("status run/ledger.jsonl", f"run/ledger.jsonl {NO_RUN}"),
    Row("status 12", "no run below runs belongs to job 12, and its output cannot be read"),
    Row("status 12_3", "no run below runs belongs to job 12_3 ... give <run.dir>/<run.name>"),
]

CONFIGURATIONS = [
    *(
        Row(f"{command} {place}", words)
        for command in ("config check", "config show", "supervise", "train")
        for place, words in {
            "missing.toml": "missing.toml does not exist; name a configuration in TOML",
            "folder": "folder is a directory; name a TOML file",
            "dangling": "dangling does not exist",
            "x.toml/below": "x.toml/below cannot be read: Not a directory",
            "'~nobody-here/x.toml'": NO_HOME,
        }.items()
    ),
    Row("config check loop", "loop ... Too many levels of symbolic links"),
    Row("supervise loop", "loop ... Too many levels of symbolic links"),
    Row(f"config check {LONG}", "nnn... cannot be a path: File name too long"),
    Row(f"supervise {LONG}", "nnn... cannot be read: File name too long"),
    Row(("config", "check", "a\0b"), r'CONFIG cannot be "a\u0000b"'),
    Row(("supervise", "a\0b"), "embedded null"),
    Row("config check /", "/ is a directory"),
    Row("config check /dev/null/x.toml", "/dev/null/x.toml cannot be read: Not a directory"),
    Row("config check /proc/self/mem", "/proc/self/mem: Input/output error", code=69),
    Row("supervise /proc/self/mem", "/proc/self/mem: Input/output error", code=69),
    Row("config check --train.seed=5 x.toml", "--train.seed=5 comes where the configuration file"),
    Row("supervise --train.seed=5 x.toml", "--train.seed=5 comes where the configuration file"),
    Row("supervise x.toml other.toml", 'argument "other.toml" is not understood'),
    Row("config check 'my run.toml'", "set run.name, such as --run", files={"my run.toml": ""}),
    Row("config check x.toml '--run.dir=~nobody-here/x'", f"run.dir: {NO_HOME}"),
    Row("config check a.toml", NO_HOME, files={"a.toml": '[checkpoint]\ndir = "~nobody-here"'}),
    Row("config check x.toml --data.dataset_path=~nobody-here", NO_HOME),
    Row("config check x.toml --eval.dataset_path=~nobody-here", NO_HOME),
]

RUN_DIRECTORIES = [
    Row(f"{command} x.toml {options}", words, files=files)
    for command in ("supervise", "train", "config check")
    for options, words, files in (
        ("--run.dir=file", "directory cannot be file/x: ... file is a file; set run.dir and", {}),
        ("--run.dir=file/below", "directory cannot be file/below/x: ... file is a file", {}),
        ("--run.dir=/dev/null", "cannot be /dev/null/x: /dev/null is a file", {}),
        ("--run.dir=loop", "cannot be loop/x (Too many levels of symbolic links)", {}),
        (f"--run.dir={LONG}", "nnn/x: a name is too long; set run.dir", {}),
        ("--run.dir=. --run.name=file", "cannot be file: file is a file", {}),
        ("--run.dir=. --run.name=loop", "cannot be loop (Too many levels", {}),
        (f"--run.name={LONG}", "run.name must have at most 200 characters", {}),
        ("--run.dir=", "no value after the equals sign; write --run.dir=VALUE", {}),
        ("--run.dir='\"\"'", "run.dir must have at least 1 characters", {}),
        ("--run.name=.", "run.name must be of letters, digits", {}),
        ("--run.name=..", "run.name must be of letters, digits", {}),
        ("--run.name=a/b", "run.name must be of letters, digits", {}),
        ("", "runs/x/ledger.jsonl is a folder, where", {"runs/x/ledger.jsonl": FOLDER}),
        ("", "runs/x/metrics.jsonl is a folder", {"runs/x/metrics.jsonl": FOLDER}),
        ("", "runs/x/config.toml is a folder", {"runs/x/config.toml": FOLDER}),
        ("", "runs/x/GAVE_UP is a folder", {"runs/x/GAVE_UP": FOLDER}),
        ("", "runs/x/attempts is a file, where", {"runs/x/attempts": ""}),
        ("", "runs/x/supervisors is a file", {"runs/x/supervisors": ""}),
        ("", "cannot be runs/x: ... runs is a file", {"runs": ""}),
        ("", "cannot be runs/x: runs/x is a file", {"runs/x": ""}),
        ("", "cannot be runs/x (Too many levels", {"runs": Link("runs")}),
    )
]

DATA = [
    Row(f"{command} x.toml {options}", words, 65, files)
    for command in ("supervise", "train", "config check")
    for options, words, files in (
        ("", "data.dataset_path=data/train: data/train is not prepared data", {}),
        ("--data.dataset_path=folder", "dataset_path=folder: folder is not prepared data", {}),
        ("--data.dataset_path=text.txt", "data.dataset_path=text.txt: ", {}),
        ("--data.dataset_path=loop", "data.dataset_path=loop: ", {}),
        ("--data.dataset_path=d", "data.dataset_path=d: d/index.json", {"d/index.json": "{}"}),
        ("--data.dataset_path=d", "data.dataset_path=d: d/index.json", {"d/index.json": b"\xff"}),
    )
]

TRIAGE = [
    Row("triage missing", "missing is not there; name a run's directory, or a log"),
    Row("triage folder", "folder is neither a run, which has a ledger.jsonl, nor a folder with"),
    Row("triage file/below", "file/below is not there; name a run's directory, or a log"),
    Row("triage dangling", "dangling is not there; name a run's directory, or a log"),
    Row("triage loop", LOOP),
    Row(f"triage {LONG}", TOO_LONG),
    Row("triage", "RUN_DIR|LOG... is missing"),
    Row("triage '~nobody-here/log'", NO_HOME),
]

ROWS = [*TRIAGE, *INIT, *CHECKPOINTS, *STATUS, *CONFIGURATIONS, *RUN_DIRECTORIES, *DATA]
