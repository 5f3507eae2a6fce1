"""Commands, options and their values that are none."""

from __future__ import annotations

from bad_inputs import Row

EXPORT = "checkpoint export run --format torch --out out"

COMMANDS = [
    Row("trian", "there is no kempner trian; did you mean kempner train? (see kempner -h)"),
    Row("supervice x.toml", "did you mean kempner supervise?"),
    Row("statsu run", "did you mean kempner status?"),
    Row("perpare text.txt", "did you mean kempner prepare?"),
    Row("checkpoints", "did you mean kempner checkpoint list?"),
    Row("confg check x.toml", "did you mean kempner config?"),
    Row("run x.toml", "there is no kempner run; did you mean kempner supervise?"),
    Row("start x.toml", "did you mean kempner supervise?"),
    Row("resume x.toml", "did you mean kempner supervise?"),
    Row("ls run", "did you mean kempner checkpoint list?"),
    Row("ps", "did you mean kempner status?"),
    Row("verify run", "did you mean kempner checkpoint verify?"),
    Row("export run", "did you mean kempner checkpoint export?"),
    Row("comprae run run", "did you mean kempner compare?"),
    Row("import run", "did you mean kempner checkpoint import?"),
    Row("check x.toml", "did you mean kempner config check?"),
    Row("explain", "did you mean kempner config explain?"),
    Row(
        "frobnicate",
        "there is no kempner frobnicate; the commands are init, prepare, plan",
    ),
    Row("x.toml", "there is no kempner x.toml; the commands are"),
    Row("TRAIN x.toml", "there is no kempner TRAIN"),
    Row("help trian", "did you mean kempner train?"),
    Row(
        "checkpoint lst run", "there is no kempner checkpoint lst; did you mean kempner checkpoint"
    ),
    Row("checkpoint lst run", "(see kempner checkpoint -h)"),
    Row("checkpoint verfy run", "did you mean kempner checkpoint verify?"),
    Row("checkpoint delete run", "the commands are list, verify, prune"),
    Row("checkpoint run", "there is no kempner checkpoint run"),
    Row(
        "config chek x.toml", "there is no kempner config chek; did you mean kempner config check?"
    ),
    Row(
        "config schema",
        "there is no kempner config schema; did you mean kempner config explain?",
    ),
    Row(
        "config x.toml",
        "there is no kempner config x.toml; the commands are show, check, explain, convert",
    ),
    Row("completion tcsh", 'SHELL must be bash, zsh or fish, not "tcsh" (see kempner completion'),
    Row("completion", "SHELL is missing"),
    Row("completion basj", "did you mean bash?"),
]

MISSING = [
    Row("status", "there is no run below runs; name <run.dir>/<run.name>, or a job id"),
    Row("train", "CONFIG is missing: configuration in TOML (see kempner train -h)"),
    Row("supervise", "name a configuration, or a command after"),
    Row("supervise --", "name a configuration, or a command after"),
    Row("supervise --nproc 2", "name a configuration, or a command after"),
    Row("prepare", "FILE... is missing: texts ... (see kempner prepare -h)"),
    Row("prepare text.txt", "--out is missing: directory to write ... (see kempner prepare -h)"),
    Row("prepare --out out", "FILE... is missing"),
    Row("checkpoint list", "RUN_DIR|DIR is missing ... (see kempner checkpoint list -h)"),
    Row("checkpoint verify", "RUN_DIR|DIR is missing"),
    Row("checkpoint prune run", "--keep-last is missing: number of newest checkpoints to keep"),
    Row("checkpoint prune --keep-last 1", "RUN_DIR|DIR is missing"),
    Row("checkpoint export run --format dcp", "give --out or --to-hf"),
    Row("checkpoint export run --out a --to-hf b", "give --out or --to-hf, not both"),
    Row("checkpoint export run --to-hf a --format dcp", "--to-hf has no effect with --format dcp"),
    Row("checkpoint import folder", "--into is missing: a run without checkpoints"),
    Row("checkpoint import --into out", "give SRC or --from-hf"),
    Row("config check", "CONFIG is missing: configuration in TOML (see kempner config check -h)"),
    Row("config show", "CONFIG is missing"),
]

OPTIONS = [
    Row("--frobnicate", "unknown option --frobnicate (see kempner -h)"),
    Row("--versio", "unknown option --versio; did you mean --version?"),
    Row("-x", "unknown option -x (see kempner -h)"),
    Row("--nproc 2 supervise x.toml", "unknown option --nproc (see kempner -h)"),
    Row("status run --foo", "unknown option --foo (see kempner status -h)"),
    Row("prepare text.txt --ou out", "unknown option --ou; did you mean --out"),
    Row("prepare text.txt --out out --worker 3", "unknown option --worker; did you mean --workers"),
    Row("prepare text.txt --out out --tokeniser x", "did you mean --tokenizer"),
    Row("prepare text.txt --out out -j 4", "unknown option -j (see kempner prepare -h)"),
    Row("checkpoint list run --all", "unknown option --all (see kempner checkpoint list -h)"),
    Row("checkpoint prune run --keep-lst 3", "unknown option --keep-lst; did you mean --keep-last"),
    Row("checkpoint prune run --keep-last 2 --dryrun", "did you mean --dry-run?"),
    Row("checkpoint export run --fromat dcp", "unknown option --fromat; did you mean --format?"),
    Row("checkpoint verify run --step 10", "unknown option --step (see kempner checkpoint verify"),
    Row("config explain --foo", "unknown option --foo (see kempner config explain -h)"),
    Row("config check x.toml --wrld 2", "unknown option --wrld; did you mean --world?"),
    Row(
        "supervise x.toml --nprocs 2", "unknown option --nprocs; did you mean --nproc? (see kempner"
    ),
    Row("supervise x.toml --nprocs 2", "(see kempner supervise -h)"),
    Row("supervise x.toml --nprocs=2", "unknown option --nprocs; did you mean --nproc?"),
    Row("supervise --nprocs 2 x.toml", "unknown option --nprocs; did you mean --nproc?"),
    Row("supervise x.toml --np 2", "unknown option --np; did you mean --nproc?"),
    Row("supervise x.toml --lancher srun", "unknown option --lancher; did you mean --launcher?"),
    Row("supervise x.toml --job-id 7", "unknown option --job-id; did you mean --jobid?"),
    Row("supervise x.toml --frobnicate", "unknown option --frobnicate (see kempner supervise -h)"),
    Row("supervise x.toml --frobnicate 3", "unknown option --frobnicate"),
    Row("supervise x.toml -x", "unknown option -x (see kempner supervise -h)"),
    Row("supervise x.toml --resume", "no option --resume: the same command continues from the new"),
    Row("supervise x.toml --continue", "no option --continue: the same command continues"),
    Row("supervise --resume x.toml", "no option --resume: the same command continues"),
    Row("train x.toml --resume", "no option --resume ... (see kempner train -h)"),
    Row("train x.toml --resume=latest", "no option --resume: the same command continues"),
    Row("supervise x.toml --dry-run", "no option --dry-run: kempner config check CONFIG checks"),
    Row("supervise x.toml --force", "no option --force: a new --run.name=NAME starts a run anew"),
    Row("supervise --config x.toml", "no option --config: name the file without an option"),
    Row("train -c x.toml", "no option -c: name the file without an option"),
    Row(
        "supervise x.toml --gpus 8", "no option --gpus: kempner supervise --nproc N starts N ranks"
    ),
    Row("supervise x.toml --nproc_per_node=8", "kempner supervise --nproc N starts N ranks"),
    Row("supervise x.toml --nnodes 2", "no option --nnodes: ask Slurm for nodes"),
    Row("supervise x.toml --name mine", "no option --name: write --run.name=NAME after the conf"),
    Row("supervise x.toml --output-dir out", "no option --output-dir: write --run.dir=FOLDER"),
    Row("train x.toml --nproc 2", "no option --nproc: it is one of kempner supervise (see kempner"),
    Row("train x.toml --launcher srun", "no option --launcher: it is one of kempner supervise"),
    Row("supervise x.toml --lr 1e-3", "unknown option --lr; did you mean --optimizer.lr=VALUE?"),
    Row("train x.toml --max-steps 3", "did you mean --train.max_steps=VALUE?"),
    Row("train x.toml --max-steps=3", "did you mean --train.max_steps=3?"),
    Row(
        "config show x.toml --interval 3", "did you mean --checkpoint.interval=VALUE or --eval.int"
    ),
    Row("config show x.toml --lr=3", "--lr=3: unknown section lr; did you mean optimizer.lr?"),
]

VALUES = [
    Row("supervise x.toml --nproc", "--nproc needs a value (see kempner supervise -h)"),
    Row("supervise x.toml --nproc=", "--nproc= has no value: is a variable of the shell not set?"),
    Row("supervise x.toml --nproc 0", "--nproc must be at least 1, not 0"),
    Row("supervise x.toml --nproc -3", "--nproc must be at least 1, not -3"),
    Row("supervise x.toml --nproc two", '--nproc must be a whole number, not "two"'),
    Row("supervise x.toml --nproc 2.5", '--nproc must be a whole number, not "2.5"'),
    Row("supervise x.toml --nproc --run.name=a", '--nproc must be a whole number, not "--run.name'),
    Row("supervise x.toml --launcher pbs", '--launcher must be local, srun or torchrun, not "pbs"'),
    Row("supervise x.toml --launcher srn", 'not "srn"; did you mean srun?'),
    Row("supervise x.toml --launcher=", "--launcher= has no value"),
    Row("supervise x.toml --jobid", "--jobid needs a value"),
    Row("supervise x.toml --jobid 7 --launcher local", "--jobid names a Slurm allocation"),
    Row("supervise x.toml --nproc 2 --launcher srun", "--nproc is for --launcher local"),
    Row("supervise x.toml --nproc 2 --launcher torchrun", "--nproc is for --launcher local"),
    Row("supervise --launcher torchrun --run.name=a -- ok.py", "a command needs --launcher local"),
    Row(
        "supervise --launcher srun --slurm.resubmit=true -- ok.py", "slurm.resubmit=true works with"
    ),
    Row(
        "supervise -- torchrun -m package", "give the run a name: kempner supervise --run.name=NAME"
    ),
    Row("supervise --run.name=a/b -- true", "run.name must be of letters, digits"),
    Row("prepare text.txt --out", "--out needs a value (see kempner prepare -h)"),
    Row("prepare text.txt --out=", "--out= has no value"),
    Row("prepare text.txt --out out --workers 0", "--workers must be at least 1, not 0"),
    Row(
        "prepare text.txt --out out --workers many", '--workers must be a whole number, not "many"'
    ),
    Row("prepare text.txt --out out --workers 1e2", '--workers must be a whole number, not "1e2"'),
    Row("checkpoint prune run --keep-last 0", "--keep-last must be at least 1, not 0"),
    Row("checkpoint prune run --keep-last all", '--keep-last must be a whole number, not "all"'),
    Row("checkpoint prune run --keep-last 1 --keep-every 0", "--keep-every must be at least 1"),
    Row("checkpoint prune run --keep-last 1 --dry-run=yes", "--dry-run takes no value"),
    Row("checkpoint prune run more --keep-last 1", "too many arguments: more"),
    Row("checkpoint verify run ten", 'STEP... must be a whole number, not "ten"'),
    Row("checkpoint verify run 10 20.5", 'STEP... must be a whole number, not "20.5"'),
    Row(
        "checkpoint list run folder", "too many arguments: folder (see kempner checkpoint list -h)"
    ),
    Row(
        "checkpoint export run --format zip --out out",
        '--format must be safetensors, dcp or torch, not "zip"',
    ),
    Row("checkpoint export run --format safetensor --out out", "did you mean safetensors?"),
    Row(f"{EXPORT} --step ten", '--step must be a whole number, not "ten"'),
    Row(f"{EXPORT} more", "too many arguments: more"),
    Row("checkpoint import folder --into out --step -1", "--step must be at least 0, not -1"),
    Row(
        "checkpoint import folder --into out --cursor x", '--cursor must be a whole number, not "x"'
    ),
    Row("config check x.toml --world", "--world needs a value"),
    Row("config check x.toml --world 0", "--world must be at least 1, not 0"),
    Row("config explain surplus words", "too many arguments: words"),
    Row("status run folder", "too many arguments: folder (see kempner status -h)"),
    Row("completion bash zsh", "too many arguments: zsh"),
]

PROGRAMS = [
    Row("supervise ok.py", '"ok.py" is a program, not a configuration; write -- before a command'),
    Row("supervise ok.py", "kempner supervise -- python ok.py"),
    Row("supervise ok.py --lr 3", "kempner supervise -- python ok.py --lr 3"),
    Row("supervise --nproc 2 ok.py", "kempner supervise -- python ok.py"),
    Row("supervise python ok.py --lr 3", "kempner supervise -- python ok.py --lr 3"),
    Row("supervise /usr/bin/python3.11.py", "is a program, not a configuration"),
    Row("supervise torchrun ok.py", "kempner supervise -- torchrun ok.py"),
    Row("supervise ./train.sh", "kempner supervise -- ./train.sh"),
    Row("train ok.py", "kempner supervise -- python ok.py"),
    Row("config check ok.py", '"ok.py" is a program, not a configuration'),
]

EMPTY = [
    Row(
        "supervise ''", "an argument after supervise is empty: is a variable of the shell not set?"
    ),
    Row("supervise x.toml ''", "an argument after x.toml is empty"),
    Row("train ''", "an argument after train is empty"),
    Row("status ''", "an argument after status is empty"),
    Row("''", "an argument is empty"),
    Row("checkpoint list ''", "an argument after list is empty"),
    Row("checkpoint verify ''", "an argument after verify is empty"),
    Row("checkpoint prune '' --keep-last 1", "an argument after prune is empty"),
    Row("checkpoint export '' --format dcp --out out", "an argument after export is empty"),
    Row("checkpoint export run --format dcp --out ''", "an argument after --out is empty"),
    Row("checkpoint import '' --into out", "an argument after import is empty"),
    Row("checkpoint import folder --into ''", "an argument after --into is empty"),
    Row("prepare '' --out out", "an argument after prepare is empty"),
    Row("prepare text.txt --out ''", "an argument after --out is empty"),
    Row("prepare text.txt --out out --tokenizer ''", "an argument after --tokenizer is empty"),
    Row("config check ''", "an argument after check is empty"),
    Row("config show ''", "an argument after show is empty"),
]

ROWS = [*COMMANDS, *MISSING, *OPTIONS, *VALUES, *PROGRAMS, *EMPTY]
