"""Configuration files that are refused."""

from __future__ import annotations

from bad_inputs import Row

FILES: list[tuple[str | bytes, str]] = [
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
    ('[supervise]\ncontrol_ports = "20000"', "supervise.control_ports must be two ports"),
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
    ('[run]\nname = "../x"', 'run.name must be of letters ... not "../x"'),
    ("[run]\ndir = 5", "run.dir must be a string in quotes, not 5"),
    ("[run]\nname = 2026-01-02", "run.name must be a string in quotes, not 2026-01-02"),
    ('[data]\ndataset_path = "a\\u0000b"', "data.dataset_path must not hold a null character"),
    ("train = 5", "train must be a table of keys, not 5"),
    ("[[train]]\nmax_steps = 5", "train must be a table of keys, not [a table]"),
    ("[train.max_steps]\nx = 1", "train.max_steps must be a whole number, not a table"),
    ("[model]\nn_heads = 3", "[model] dim=256 must be a multiple of n_heads=3"),
    ("[model]\nn_kv_heads = 3", "[model] n_heads=4 must be a multiple of n_kv_heads=3"),
    ("[model]\nhead_dim = 7", "[model] the head width must be even"),
    (
        "[scheduler]\ndecay_steps = 5",
        '[scheduler] decay_steps has no effect with name="cosine"; remove it',
    ),
    ('[scheduler]\nname = "linear"\ndecay_steps = 5', 'no effect with name="linear"; remove it'),
    ("[train]\nmicro_batch_size = 9", "[train] micro_batch_size=9 exceeds global_batch_size=8"),
    (f'[run]\nname = "{300 * "n"}"', "run.name must have at most 200 characters"),
    ("[eval]\ninterval = 5", "[eval] interval needs dataset_path or sets, the held-out tokens"),
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

ROWS = [
    Row(
        "config check debug.toml", f"kempner: debug.toml ... {words}", files={"debug.toml": content}
    )
    for content, words in FILES
]
