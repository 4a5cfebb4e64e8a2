# Everything sets itself up: `make demo` and `make test` need Python 3.11, make and a package registry.
#   make test                run with another Python:   make test PYTHON=python3.12
PYTHON ?= python3
# Asked for by its number: a range takes a CUDA build of several GB.
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
# Processes that the tests are spread over.
WORKERS ?= 2

VENV := .venv
ifeq ($(OS),Windows_NT)
BIN := $(VENV)/Scripts
else
BIN := $(VENV)/bin
endif
PY := $(BIN)/python
READY := $(VENV)/.ready
MODEL := .cache/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
DEMO := .cache/demo/smollm2-int8

export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help demo test check lint format typecheck model bench clean

help:
	@echo "make demo       fetch SmolLM2-135M, export it to int8, generate text, print a latency table"
	@echo "make test       all tests, those on the real model too"
	@echo "make check      what CI runs: format, lint, types, tests"
	@echo "make format     format the code"
	@echo "make typecheck  mypy alone"
	@echo "make model      fetch the model for the demo and the tests (98 MB, once)"
	@echo "make bench      the latency table at prompts of 128 and 1024 tokens"
	@echo "make clean      delete what is made from the code; the environment and the model stay"

$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "onnxlm needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet "$(TORCH)"
	$(PY) -m pip install --quiet -e ".[export,dev]"
	$(PY) -c 'import pathlib; pathlib.Path("$(READY)").touch()'

$(MODEL): | $(READY)
	$(PY) scripts/fetch_smollm2.py $(MODEL)

model: $(MODEL)

demo: $(READY) $(MODEL)
	$(BIN)/onnxlm export $(MODEL) $(DEMO) --precision int8
	$(BIN)/onnxlm generate $(DEMO) "The capital of France is" --max-new-tokens 48
	$(BIN)/onnxlm bench $(DEMO)

bench: $(READY) $(MODEL)
	$(BIN)/onnxlm export $(MODEL) $(DEMO) --precision int8
	$(BIN)/onnxlm bench $(DEMO) --prompt-tokens 128,1024 --new-tokens 128

test: $(READY) $(MODEL)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) $(PYTEST_ARGS)

lint: $(READY)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .

format: $(READY)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

typecheck: $(READY)
	$(PY) scripts/link_tree.py
	$(PY) -m mypy

check: lint typecheck test

clean:
	$(PYTHON) -c 'import shutil; [shutil.rmtree(p, ignore_errors=True) for p in "build dist .cache/demo .pytest_cache .hypothesis .mypy_cache .ruff_cache onnxlm.egg-info".split()]'
