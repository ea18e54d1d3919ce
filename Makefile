# `make quickstart` and `make test` are the commands of the README; `make help` lists all targets.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
RUNTIME := $(VENV)/.runtime-installed

.PHONY: help setup quickstart test docs test-all faults cluster-tests gpu chaos check format clean

help:            ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/:/'

setup: $(INSTALLED)  ## create .venv with the versions of constraints.txt

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; found %s. Try: make PYTHON=python3.11 setup" % sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)

# What pip does, in a few lines: it prints hundreds, or, with --quiet, none for minutes.
PIP = @echo 'Installing the versions of constraints.txt into $(VENV): minutes, and more than 1 GB to download the first time'; \
	$(BIN)/pip install --disable-pip-version-check --constraint constraints.txt $(1) | while read -r word rest; do \
		case "$$word $$rest" in \
			Collecting*) ((++n % 20)) || echo "  $$n packages found" ;; \
			Downloading*[0-9][0-9][0-9].[0-9]' MB'*) echo "  $$word $$rest" ;; \
			Installing*) echo "  installing $$n packages" ;; \
		esac; done

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(call PIP,--editable '.[dev]')
	touch $@

# Without the tools of tests, and without compiling modules that are never imported.
$(RUNTIME): pyproject.toml constraints.txt | $(BIN)/python
	$(call PIP,--no-compile --editable .)
	touch $@

quickstart: $(RUNTIME)  ## real text to a trained, evaluated, tracked model in a few minutes
	PYTHONDONTWRITEBYTECODE= $(BIN)/python benchmarks/quickstart.py

test: setup      ## the test suite, 6 to 10 minutes on 2 quiet cores
	$(BIN)/python -m pytest -m 'not slow and not fault and not cluster and not gpu' --numprocesses 2 --dist loadfile

docs: setup      ## the documentation site in build/site, without network; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --clean

test-all: setup  ## also the exhaustive grids, with all examples of property tests
	$(BIN)/python -m pytest -m 'not fault and not cluster and not gpu' --hypothesis-profile=all

faults: setup    ## run the fault matrix of docs/faults.md: killed ranks, full disks, damaged files
	$(BIN)/python -m tests.faults.matrix --run

cluster-tests: setup  ## real Slurm, PostgreSQL, Ray nodes and network namespaces; prints what was skipped and why
	$(BIN)/python -m pytest -m cluster -rs

GPU_SECONDS ?= 1200
gpu: setup       ## on a machine with a GPU: its tests, for at most GPU_SECONDS, then speed and utilisation of the published models
	mkdir -p runs
	TRITON_INTERPRET=0 timeout --foreground --kill-after 60 --signal INT $(GPU_SECONDS) $(BIN)/python -m pytest -m gpu -rs; tests=$$?; \
	$(BIN)/python benchmarks/gpu.py --seconds $(GPU_SECONDS) > runs/gpu.md && cat runs/gpu.md && exit $$tests

N ?= 100
chaos: setup     ## kill random processes of training runs N times and compare with a quiet run
	$(BIN)/python benchmarks/chaos.py --kills $(N)

check: setup     ## format, lint, types, and the size of the packages (tests/statements.toml)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m tests.statements
	$(BIN)/mypy

format: setup    ## apply the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:           ## remove caches of tools (not data, not runs)
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
