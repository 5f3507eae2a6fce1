"""Overrides of the configuration that are refused."""

from __future__ import annotations

from bad_inputs import Row

ARGUMENTS: list[tuple[str, list[str], str]] = [
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
    ("", ["--model.preset=llama3-7b"], "model.preset must be ... 'qwen3-32b', not \"llama3-7b\""),
    ("", ["--model.factory=ours"], 'model.factory: "ours" names no function; write'),
    ("", ["--model.options=3"], "model.options must be a table of keys, not 3"),
    ("", ["--model.options={n = 3}"], "[model] options has no effect without factory"),
    (
        "",
        ["--model.factory=ours:build", "--model.dim=64"],
        "[model] dim has no effect with factory; put it into options",
    ),
    (
        "",
        ["--model.preset=debug", "--model.factory=ours:build"],
        "[model] preset has no effect with factory",
    ),
    (
        "",
        ["--model.rope_scaling.low_freq_factor=2"],
        "[model.rope_scaling] low_freq_factor has no effect without factor",
    ),
    ("", ["--train.fp8=true"], "[train] fp8=true needs compile=true"),
    (
        "",
        ["--train.activation_checkpointing_every=2"],
        "[train] activation_checkpointing_every=2 has no effect with ... remove it",
    ),
    (
        "",
        ["--model.factory=ours:build", "--train.compile=true"],
        "train.compile has no effect with model.factory; remove it",
    ),
    (
        "",
        ["--model.factory=ours:build", "--data.document_mask=true"],
        "data.document_mask has no effect with model.factory; remove it",
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

ROWS = [
    Row(("config", "check", "debug.toml", *arguments), words, files={"debug.toml": content})
    for content, arguments, words in ARGUMENTS
]
