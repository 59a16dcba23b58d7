# One command each; the first one on a fresh machine also makes .venv and installs what is needed.
#
#   make demo        fused GEMM + all-reduce on four simulated ranks, searched for races
#   make test        the tests that need no GPU
#   make newest      the tests of the language, the simulator and Gluon on the newest Triton release
#   make test-gpu    the tests that need GPUs
#   make mutants     mistakes made in copies of the tree, one at a time: tests must notice each (half an hour; ten in test)
#   make lint types  ruff, mypy
#   make bench       the simulator's speed, written to benchmarks/results/
#
# Without a GPU a CPU build of torch is enough. Where pip would take the CUDA build, point it to the CPU one:
#   make test PIP_TORCH_ARGS="--index-url URL"      (URL: see PyTorch's "Get started" page, Linux, pip, CPU)
# Where there is a GPU and $(PYTHON) already has a torch that sees it, that torch and its Triton are used.

PYTHON ?= python3
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0
PIP_TORCH_ARGS ?=
# How many test processes; each rank of a simulation is a greenlet, so a test needs one core. Each process begins with
# tests that stand together, whose files and fixtures it then loads alone, and takes others' when it has none left.
JOBS ?= 2
PYTEST = $(PY) -m pytest -n $(JOBS) --dist worksteal -m "not gpu"
ARGS ?=

BIN := .venv/bin
PY := $(BIN)/python
# Python writes the bytecode of the modules that are imported, which are few of those that are installed.
INSTALL := $(PY) -m pip --disable-pip-version-check install --quiet --no-compile
STAMP := .venv/.installed
# Processes share the bytecode. A container that sets this would have each test process compile torch's modules anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := test
.PHONY: setup demo test newest test-gpu mutants lint types bench format clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "pkt needs Python 3.10 or newer: make PYTHON=python3.12")'
	@set -e; \
	if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 \
	   && $(PYTHON) -c 'import sys, torch, triton; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then \
	    echo "using the torch and Triton of $(PYTHON)"; \
	    $(PYTHON) -m venv --system-site-packages .venv; \
	else \
	    $(PYTHON) -m venv .venv; \
	    $(INSTALL) $(PIP_TORCH_ARGS) "$(TORCH)"; \
	    $(INSTALL) "$(TRITON)"; \
	fi
	$(INSTALL) -e ".[dev,plot]"
	@touch $@

# The newest Triton in a folder of its own, ahead of .venv's on the path: nothing else is installed twice.
.newest/.installed: $(STAMP)
	rm -rf .newest
	$(INSTALL) --no-deps --upgrade --target .newest triton
	@touch $@

test: $(STAMP)
	$(PYTEST) $(ARGS)

# Without the tests of the simulator's machine: schedules, races, deadlocks, faults, hosts. They know no Triton. What a
# kernel's text means on this release the others tell: types, values, orders of memory, loops, and the PTX.
NEWEST_TESTS ?= tests/language tests/simulate tests/runtime/test_relaunch.py tests/kernels/test_gluon_releases.py
newest: .newest/.installed
	PYTHONPATH=.newest $(PY) -c 'import triton; print("Triton", triton.__version__)'
	PYTHONPATH=.newest $(PYTEST) -m "not gpu and not machine" $(NEWEST_TESTS) $(ARGS)

test-gpu: $(STAMP)
	$(PY) -m pytest -m gpu $(ARGS)

mutants: $(STAMP)
	$(PY) -m tests.mutation --jobs $(JOBS) $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)
	$(BIN)/mypy

demo: $(STAMP)
	$(PY) -m benchmarks.demo $(ARGS)

bench: $(STAMP)
	$(PY) -m benchmarks.simulator $(ARGS)

clean:
	rm -rf .venv .newest build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
