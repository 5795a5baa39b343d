# Everything a developer or CI runs. Each target sets itself up in .venv first; a second run is
# quick. Needs make and Python 3.10 or newer (PYTHON=python3.12 chooses one).

PYTHON ?= python3
VENV   ?= .venv
SEEDS  ?= 200
TESTS  ?= tests
BENCH  ?=

BIN    := $(VENV)/bin
GPU_PYTHON ?= $(BIN)/python
GPU_TESTS  ?= tests/gpu
NEWEST       := $(VENV)-newest-torch
NEWEST_TESTS ?= tests/worker tests/horovod tests/e2e
READY  := $(VENV)/.installed
TRAINS := $(VENV)/.trains

# Tests start thousands of interpreters; none is to compile the sources anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help environment install parts demo test test-gpu test-newest-torch check docs sim nightly bench recording page format clean

help: ## show this
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /make \1\t/' | expand -t 24

environment: $(READY)

parts: ## install everything that tests can use (Debian, root; docs/testing.md)
	VENV=$(VENV) PYTHON=$(PYTHON) tests/install-parts.sh

install: $(TRAINS) ## install what training needs into .venv; other targets do so by themselves

demo: $(TRAINS) ## train on three workers, kill one on the way, show what happened
	$(BIN)/python examples/demo.py

# In the order of their names: the longest tests, of clusters and whole jobs, are begun first.
test: $(READY) ## run the tests, three files at a time (TESTS=tests/launcher for some of them)
	$(BIN)/python -m pytest $(TESTS) -m "not night" -q -n 3 --dist loadfile --no-loadscope-reorder

# On a machine with a torch of its own: make test-gpu GPU_PYTHON=python3
test-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(READY)) ## the tests that need an NVIDIA GPU, with a table of figures (docs/nccl.md)
	$(GPU_PYTHON) -m pytest -c tests/gpu/alone.ini --rootdir . -m gpu $(GPU_TESTS) -v -s

# Next to the environment, as it is large (6 GB) and stays. pip looks for a newer one each time.
test-newest-torch: ## worker, horovod and e2e tests with the newest torch of setup.cfg's range
	$(call python-is-new-enough)
	@test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	@grep -v '^torch==' constraints.txt > $(NEWEST)/constraints.txt
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade \
		--constraint $(NEWEST)/constraints.txt --editable '.[torch,dev,examples,stacks]' torch
	@$(NEWEST)/bin/python -c 'import torch; print("torch", torch.__version__, flush=True)'
	$(NEWEST)/bin/python -m pytest $(NEWEST_TESTS) -m "not night" -q -n 3 --dist loadfile --no-loadscope-reorder

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

recording: $(READY) ## record `make demo` as docs/demo.svg
	$(BIN)/python -m benchmarks.record docs/demo.svg make -s demo

docs: $(READY) ## build the documentation as a site: site/index.html, to be read without a network
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

page: ## build the committed page of the driver, elastic_driver/page/ (needs Node.js 20 with npm)
	cd page && npm ci --ignore-scripts --no-audit --no-fund && npm run build

format: $(READY) ## rewrite the sources in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove build products; the environment stays
	rm -rf build dist site ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis \
		.import_linter_cache

# What training needs; and beside it all that the other targets need.
$(TRAINS): setup.cfg pyproject.toml constraints.txt
	$(call install,torch$(comma)examples)
	@touch $@

$(READY): setup.cfg pyproject.toml constraints.txt
	$(call install,torch$(comma)dev$(comma)docs$(comma)examples)
	@touch $(TRAINS) $@

comma := ,
define python-is-new-enough
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	{ echo "Python 3.10 or newer is needed; try make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
endef

define install
$(call python-is-new-enough)
@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	--constraint constraints.txt --editable '.[$(1)]'
endef
