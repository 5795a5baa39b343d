# Everything a developer or CI runs. Each target sets itself up in .venv first; a second run is
# quick. Needs make and Python 3.10 or newer (PYTHON=python3.12 chooses one).

PYTHON ?= python3
VENV   ?= .venv
SEEDS  ?= 200
TESTS  ?= tests
BENCH  ?=

BIN   := $(VENV)/bin
READY := $(VENV)/.installed

# Tests start thousands of interpreters; none is to compile the sources anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help environment parts demo test test-gpu check sim nightly bench format clean

help: ## show this
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /make \1\t/' | expand -t 16

environment: $(READY)

parts: ## install everything that tests can use (Debian, root; docs/testing.md)
	VENV=$(VENV) PYTHON=$(PYTHON) tests/install-parts.sh

demo: $(READY) ## train on three workers, kill one on the way, show what happened
	$(BIN)/python examples/demo.py

# In the order of their names: the longest tests, of clusters and whole jobs, are begun first.
test: $(READY) ## run the tests, three files at a time (TESTS=tests/launcher for some of them)
	$(BIN)/python -m pytest $(TESTS) -q -n 3 --dist loadfile --no-loadscope-reorder

test-gpu: $(READY) ## the tests that need an NVIDIA GPU, with their figures (docs/nccl.md)
	$(BIN)/python -m pytest -m gpu tests/gpu -v -s

check: $(READY) ## formatting, lint, types, and which package may import which
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

sim: $(READY) ## simulate SEEDS clusters full of failures against the job's core
	$(BIN)/python -m tests.sim --seeds $(SEEDS)

nightly: $(READY) ## what takes hours: many kills, schedules, slowed ranks, faults of hosts and seeds
	VENV=$(VENV) tests/nightly.sh

bench: $(READY) ## all benchmarks beside their peers, in minutes (BENCH=recovery for one of them)
	$(BIN)/python -m benchmarks $(BENCH)

format: $(READY) ## rewrite the sources in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove build products; the environment stays
	rm -rf build dist ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis \
		.import_linter_cache

$(READY): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "Python 3.10 or newer is needed; try make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[torch,dev,examples]'
	@touch $@
