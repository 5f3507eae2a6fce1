"""Files of a run, checkpoints, text and tokens that are not what they should be."""

from __future__ import annotations

from bad_inputs import FOLDER, LONG, Link, Row

PREPARE = "prepare --out out"

SOURCES = [
    Row(f"{PREPARE} missing", "missing does not exist: name text files, .jsonl files or folders"),
    Row(f"{PREPARE} text.txt missing", "missing does not exist"),
    Row(f"{PREPARE} dangling", "dangling does not exist"),
    Row(f"{PREPARE} file", "there is no text in file: nothing to prepare"),
    Row(f"{PREPARE} folder", "folder folder contains no text file"),
    Row(f"{PREPARE} loop", "loop cannot be a path: Too many levels of symbolic links"),
    Row(f"{PREPARE} {LONG}", "nnn... cannot be a path: File name too long"),
    Row(f"{PREPARE} /dev/null", "/dev/null is neither a file nor a folder"),
    Row(f"{PREPARE} text.txt/below", "text.txt/below"),
    Row(f"{PREPARE} '~nobody-here/x'", "the home folder ~nobody-here is unknown"),
    Row((*PREPARE.split(), "a\0b"), r'FILE... cannot be "a\u0000b"'),
    Row(f"{PREPARE} a.jsonl", "a.jsonl:1: ", 65, {"a.jsonl": "no json\n"}),
    Row(f"{PREPARE} a.jsonl", "a.jsonl:2: the line is not JSON", 65, {"a.jsonl": '{"text":""}\n{'}),
    Row(f"{PREPARE} a.jsonl", "a.jsonl:1: the line is a JSON list", 65, {"a.jsonl": "[]\n"}),
    Row(f"{PREPARE} a.jsonl", 'has no key "text" (it has: body)', 65, {"a.jsonl": '{"body": ""}'}),
    Row(f"{PREPARE} a.jsonl", '"text" is not a string', 65, {"a.jsonl": '{"text": 5}'}),
    Row(f"{PREPARE} a.jsonl", "half a surrogate", 65, {"a.jsonl": '{"text": "\\ud800"}'}),
    Row(f"{PREPARE} a.jsonl", "not UTF-8 (at its byte", 65, {"a.jsonl": b'{"text": "\xff"}'}),
    Row(f"{PREPARE} a.jsonl", "nested too deeply", 65, {"a.jsonl": "[" * 100_000}),
    Row(f"{PREPARE} docs.jsonl --text-key body", 'no key "body" (it has: text)', 65),
    Row(f"{PREPARE} a.jsonl", "all documents are empty", 65, {"a.jsonl": '{"text": ""}'}),
]

OUTPUTS = [
    Row("prepare text.txt --out folder", "folder ... not empty", files={"folder/else": ""}),
    Row("prepare text.txt --out file", "--out file cannot be written"),
    Row("prepare text.txt --out file/below", "--out file/below cannot be written: Not a directory"),
    Row("prepare text.txt --out /dev/null", "--out /dev/null cannot be written"),
    Row("prepare text.txt --out loop", "loop cannot be a path"),
    Row(f"prepare text.txt --out {LONG}", "nnn... cannot be a path: File name too long"),
    Row("prepare text.txt --out /proc/tokens", "--out /proc/tokens cannot be written"),
]

TOKENIZERS = [
    Row(
        f"{PREPARE} text.txt --tokenizer missing.json", "missing.json cannot be read: No such file"
    ),
    Row(f"{PREPARE} text.txt --tokenizer folder", "folder cannot be read: Is a directory"),
    Row(f"{PREPARE} text.txt --tokenizer bytes", "bytes cannot be read ... the word byte"),
    Row(f"{PREPARE} text.txt --tokenizer loop", "loop cannot be read: Too many levels"),
    Row(f"{PREPARE} text.txt --tokenizer file", "file is not a tokenizer.json", 65),
    Row(f"{PREPARE} text.txt --tokenizer x.json", "is not a tokenizer", 65, {"x.json": "{}"}),
    Row(f"{PREPARE} text.txt --tokenizer x.json", "x.json", 65, {"x.json": b"\xff\xfe"}),
    Row(f"{PREPARE} text.txt --eot '<end>'", "--eot <end> needs a tokenizer.json"),
]

READ_A_RUN = ("checkpoint list run", "checkpoint verify run")

RUN_FILES = [
    Row("status r", "r is not a run: it has no ledger.jsonl", files={"r/ledger.jsonl": FOLDER}),
    Row("status r", "r is not a run", files={"r/ledger.jsonl": Link("ledger.jsonl")}),
]

STEP = "run/checkpoints/step-00000010"

CHECKPOINTS = [
    Row(
        "checkpoint verify run 11", "step 11 is not committed in run/checkpoints; these are: 10, 20"
    ),
    Row("checkpoint verify run 10 11", "step 11 is not committed"),
    Row("checkpoint verify run -- -1", "step -1 is not committed"),
    Row("checkpoint export run --format dcp --out out --step 11", "step 11 is not committed"),
    Row(
        f"checkpoint export {STEP} --format dcp --out out --step 20",
        "is not the checkpoint of step",
    ),
    Row("checkpoint export run --format dcp --out folder", "folder exists already; choose another"),
    Row("checkpoint export run --format torch --out file", "file exists already; choose another"),
    Row("checkpoint export run --format torch --out loop", "loop cannot be a path"),
    Row(
        "checkpoint export run --format torch --out file/a",
        "file is not a folder, so file/a cannot be in it",
    ),
    Row("checkpoint export run --format dcp --out /proc/a/b", "/proc/a"),
    Row(f"checkpoint export run --format dcp --out {LONG}", "cannot be a path: File name too long"),
    Row(
        f"checkpoint prune {STEP} --keep-last 1", "is one checkpoint; name the folder that contains"
    ),
    Row("checkpoint prune r --keep-last 1", "has no `latest`", files={"r/step-00000010": FOLDER}),
    Row("checkpoint verify r", "has no committed checkpoint", files={"r/step-00000010": FOLDER}),
    Row(
        "checkpoint export r --format dcp --out out",
        "no `latest`",
        files={"r/step-00000010": FOLDER},
    ),
    *(
        Row(f"checkpoint verify run/checkpoints/{name}", said, 65, files, on_stdout=True)
        for name, said, files in (
            ("step-00000010", "manifest.json is damaged", {f"{STEP}/manifest.json": "{}"}),
            (
                "step-00000010",
                "manifest.json cannot be read: it is empty",
                {f"{STEP}/manifest.json": ""},
            ),
            ("step-00000010", "__0_0.distcp", {f"{STEP}/__0_0.distcp": "short"}),
            ("step-00000010", "all ranks: .metadata", {f"{STEP}/.metadata": "no pickle"}),
        )
    ),
    Row(
        f"checkpoint export {STEP} --format dcp --out out",
        "manifest.json is damaged",
        65,
        {f"{STEP}/manifest.json": "{}"},
    ),
    Row(
        f"checkpoint export {STEP} --format dcp --out out",
        "__0_0.distcp",
        65,
        {f"{STEP}/__0_0.distcp": "short"},
    ),
    Row(f"compare run {STEP}", "__0_0.distcp", 65, {f"{STEP}/__0_0.distcp": "short"}),
    Row("compare r run", "r/.metadata is refused", 65, {"r/.metadata": "no pickle"}),
    Row(
        "compare run r",
        "r/model.safetensors is damaged or cut off",
        65,
        {"r/model.safetensors": "short"},
    ),
    Row("compare x.toml file", "x.toml and file have no step in common; name two files of"),
    Row(
        "compare r/a r/a",
        "r/a is no file of `kempner replay --trace`",
        65,
        {"r/a": '{"kind": "step"}\n'},
    ),
    Row("checkpoint import missing --into out", "missing/.metadata cannot be read: No such file"),
    Row(
        "checkpoint import folder --into out", "folder/.metadata cannot be read ... name the folder"
    ),
    Row("checkpoint import file --into out", "file/.metadata cannot be read: Not a directory"),
    Row("checkpoint import loop --into out", "loop cannot be a path"),
    Row(f"checkpoint import {LONG} --into out", "nnn... cannot be a path"),
    Row("checkpoint import r --into out", "r/.metadata", 65, {"r/.metadata": "no pickle"}),
    Row("checkpoint import r --into out", "r/.metadata", 65, {"r/.metadata": ""}),
    Row(f"checkpoint import {STEP} --into run", "has checkpoints already; import into a run that"),
    Row(
        f"checkpoint import {STEP} --into file", "file is not a folder, so file/checkpoints cannot"
    ),
    Row(f"checkpoint import {STEP} --into loop", "loop cannot be a path"),
]

FAULTS = [
    Row(f"{command} --resilience.faults='[\"{fault}\"]'", words)
    for command in ("config check x.toml", "supervise x.toml", "train x.toml")
    for fault, words in (
        ("frobnicate rank 0 at step 3", "is not a fault; the kinds are kill, stop"),
        ("kill rank 0", "kill ... step needs a step; name one, as in `at step 20`"),
        ("kill", "is not a fault; write KIND rank R"),
    )
]

ABSENT = "--resilience.faults='[\"kill rank 2 at step 3\"]'"

FAULTS += [
    Row(
        f"config check x.toml --world 2 --model.vocab_size=9 {ABSENT}", "no rank 2; the 2 ranks are"
    ),
    Row(f"supervise x.toml --nproc 2 {ABSENT}", '"kill rank 2 at step 3": there is no rank 2'),
    Row(f"supervise x.toml {ABSENT}", "there is no rank 2; the 1 rank is numbered from 0"),
    Row(f"train x.toml {ABSENT}", "there is no rank 2; the 1 rank is numbered from 0"),
]

SAMPLE = [
    Row("sample", "RUN_DIR|DIR is missing"),
    Row("sample missing --prompt a", "missing does not exist"),
    Row("sample folder --prompt a", "folder contains no checkpoint"),
    Row("sample loop --prompt a", "loop cannot be a path"),
    Row("sample run", "give either --prompt, how a text begins, or --chat, what a user says"),
    Row("sample run --prompt a --max-tokens 0", "--max-tokens must be at least 1, not 0"),
    Row("sample run --prompt a --top-p 2", "--top-p must be at most 1, not 2"),
    Row("sample run --prompt a --temperature hot", '--temperature must be a number, not "hot"'),
    Row("sample run --frobnicate", "unknown option --frobnicate (see kempner sample -h)"),
]

PRUNE = [
    Row("prune", "RUN_DIR is missing"),
    Row("prune missing --keep-last 1", "missing"),
    Row("prune run", "say which logs are old, with --older-than AGE or --keep-last N"),
    Row("prune run --keep-last 0", "--keep-last must be at least 1, not 0"),
    Row("prune run --older-than soon", "soon"),
    Row("prune folder --frobnicate", "unknown option --frobnicate (see kempner prune -h)"),
    Row("prune loop --keep-last 1", "loop cannot be a path"),
    Row("prune ''", "an argument after prune is empty"),
]

ROWS = [*SAMPLE, *PRUNE, *SOURCES, *OUTPUTS, *TOKENIZERS, *RUN_FILES, *CHECKPOINTS, *FAULTS]
