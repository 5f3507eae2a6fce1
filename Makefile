# `make demo` and `make test` each do all the set-up that they need on a fresh machine.

PYTHON ?= python3
BIN := .venv/bin
# What is in .venv: the package; and what its tests and pages need.
INSTALLED := .venv/.installed
READY := .venv/.ready
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
UV := build/uv/bin/uv --no-python-downloads
# The first release of each, which is the strictest; 3.11.2 is Debian 12's.
LOCKED_PYTHONS := 3.11.0 3.11.2 3.12.0 3.13.0 3.14.0
# A file's tests stay together: they share what is dear to make. A worker that dies ends the session:
# pytest-xdist 3.8 waits for ever for another one to go on with its files.
TOGETHER := --dist=loadfile --no-loadscope-reorder --max-worker-restart=0 --durations=8
CLUSTERS := $(shell cores=$$(nproc); echo $$((cores < 3 ? cores + 1 : 4)))
NEWER_SLURMS := 24.11 26.05
PARTS := tests/unit tests/matrix $(sort $(wildcard tests/d*/*/) $(wildcard tests/slurm/*/))

.PHONY: install demo lock resolve test check long pytest pytest-slurm pytest-others newer-slurms \
	planted peers versions walk benchmarks stale lint docs dist clean

install: $(READY)

demo: $(INSTALLED)
	$(BIN)/python scripts/demo/corpus.py data/demo/text
	$(BIN)/kempner prepare --out data/demo/train data/demo/text/train
	$(BIN)/kempner prepare --out data/demo/held_out data/demo/text/held_out
	$(BIN)/kempner supervise configs/train/debug.toml
	$(BIN)/kempner sample runs/debug --prompt "The " --seed 0
	$(BIN)/python scripts/demo/report.py configs/train/debug.toml

# Ten minutes on two cores: every promise, by few tests (tests/lengths.py says which).
test: $(READY)
	$(MAKE) pytest OPTIONS=--chosen

# Half an hour: all but the drills; then the main tests of Slurm on each newer version.
check: $(READY)
	$(MAKE) pytest
	$(MAKE) newer-slurms

# Hours: what the others do a part of: kills, power loss, damage, lost nodes, storage that fails; as
# root, or the full disks and the cluster are left out. By parts: what has passed at this commit is
# not done again. What happened is in docs/drills.jsonl, and in the table of storage faults.
long: $(READY)
	mkdir -p build
	for part in $(PARTS); do \
		KEMPNER_DRILLS=all KEMPNER_DRILLS_RECORD=docs/drills.jsonl \
			$(BIN)/python -m pytest $$part $(TOGETHER) --passed=build/long.jsonl --timeout=1200 \
			|| test $$? -eq 5 || exit 1; \
	done
	$(BIN)/python scripts/docs/storage_fault_page.py
	$(BIN)/python scripts/docs/performance_page.py

# The tests on a real Slurm mostly wait for it, so they run beside the others.
pytest: $(READY)
	$(MAKE) --jobs=2 --output-sync=target pytest-slurm pytest-others

pytest-slurm: $(READY)
	$(call run_tests,tests/slurm,$(CLUSTERS),slurm)

pytest-others: $(READY)
	$(call run_tests,--ignore=tests/slurm,auto,others)

# With ONCE_MORE, tests that fail beside others on a busy machine are run again, one after the other,
# and are named: what fails twice has failed. Nothing is forgiven that ends the session early.
define run_tests
$(BIN)/python -m pytest $(1) --numprocesses=$(2) $(TOGETHER) $(OPTIONS) -o cache_dir=build/pytest/$(3) \
	|| { test $$? -eq 1 -a -n "$(ONCE_MORE)" && echo "Once more, one after the other:" \
	&& $(BIN)/python -m pytest $(1) -o cache_dir=build/pytest/$(3) --verbose --maxfail=1 \
		--last-failed --last-failed-no-failures=none; }
endef

newer-slurms: $(addprefix pytest-slurm-,$(NEWER_SLURMS))

pytest-slurm-%: $(READY)
	$(call run_tests,tests/slurm --slurm=$*,$(CLUSTERS),slurm-$*)

# Do the tests notice bugs? They are planted one after the other: tests/planted/run.py.
planted: $(READY)
	$(BIN)/python tests/planted/run.py --record docs/planted_bugs.jsonl

# Hours: `make test` without Slurm on each Python that is there, on the oldest and the newest torch.
versions: $(READY)
	$(BIN)/python tests/python_versions.py --record docs/versions.jsonl
	$(BIN)/python scripts/docs/performance_page.py

# What other tools do when they are interrupted, and the pages that say so: an hour or more.
peers: $(READY)
	$(BIN)/python benchmarks/peers/run.py --install
	$(BIN)/python scripts/docs/comparison_page.py

# Five readers type their pages, each in an environment of its own; how long each command is silent.
walk: $(READY)
	$(BIN)/python tests/walk/walks.py --record docs/walks.jsonl
	$(BIN)/python tests/walk/silences.py --record docs/silences.jsonl

# Which records are older than the code that they prove, and by how many commits.
stale: $(READY)
	$(BIN)/python tests/records.py

# What two cores can measure, hours of it, and the pages made of it; cut off, it goes on where it was.
benchmarks: $(READY)
	$(BIN)/python benchmarks/measure.py

# Of the benchmarks, which run seldom: do they still call what is there?
BENCHMARKS := $(filter-out benchmarks/peers/recipes/%.py benchmarks/in_memory/buddy_here.py, \
	$(wildcard benchmarks/*.py benchmarks/*/*.py))
BENCHMARK_PATH := tests:tests/slurm:benchmarks:benchmarks/goodput:benchmarks/peers
CALLS_ONLY := --check-untyped-defs --implicit-reexport --ignore-missing-imports \
	--follow-untyped-imports --disable-error-code=misc --no-error-summary

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	MYPYPATH=$(BENCHMARK_PATH) $(BIN)/mypy --config-file= $(CALLS_ONLY) $(BENCHMARKS)
	$(BIN)/lint-imports
	$(BIN)/shellcheck --external-sources scripts/slurm/*.sh tests/slurm/*.sh kempner/lab/*.sh .ci/run

# The pages as a site, in build/docs/index.html.
docs: $(READY)
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs build/docs

# What is uploaded when there is a release: CONTRIBUTING.md.
dist: build/dist/bin/twine
	rm -rf dist
	build/dist/bin/python -m build
	build/dist/bin/twine check --strict dist/*

build/dist/bin/twine:
	$(call new_environment,build/dist)
	build/dist/bin/pip install --quiet --disable-pip-version-check build==1.6.1 twine==7.0.0

# Not every Python can make one: Debian's comes without ensurepip.
define new_environment
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo >&2 \
	'$(PYTHON) is not a Python 3.11 or later; name one that is: make PYTHON=python3.12'; exit 1; }
@$(PYTHON) -m ensurepip --version >/dev/null 2>&1 || { echo >&2 \
	"$(PYTHON) has no ensurepip; install it, on Debian and Ubuntu by:" \
	"apt install python$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"; \
	exit 1; }
$(PYTHON) -m venv $(1)
endef

# constraints.txt is one lock for all Pythons and platforms. `make lock` brings it in line with
# pyproject.toml and moves no other pin; UPGRADE="--upgrade-package NAME" moves one.
lock: build/uv/bin/uv
	$(UV) pip compile --quiet --universal --python-version 3.11.0 --extra dev --no-annotate \
		--custom-compile-command "make lock" $(UPGRADE) --output-file constraints.txt pyproject.toml

# Do the pins fit each Python? From the packages' metadata; nothing is installed.
resolve: build/uv/bin/uv
	printf '%s\n' $(LOCKED_PYTHONS) | xargs --max-procs=0 --replace=VERSION \
		$(UV) pip compile --quiet --python-version VERSION --python-platform linux \
		--only-binary :all: --extra dev -c constraints.txt --output-file build/uv/VERSION.txt \
		pyproject.toml

build/uv/bin/uv:
	$(call new_environment,build/uv)
	build/uv/bin/pip install --quiet --disable-pip-version-check uv==0.13.9

$(INSTALLED): pyproject.toml constraints.txt
	$(call new_environment,.venv)
	$(PIP_INSTALL) -e .
	touch $@

$(READY): $(INSTALLED)
	$(PIP_INSTALL) -e '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache
