# Each target makes the environment it needs. PYTHON picks the interpreter (3.11 or newer).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
TEST_JOBS ?= 2

.PHONY: help demo test test-parity lint check bench reproduce clean

help:
	@echo "make demo         answer a batch of prompts with the embedded model"
	@echo "make test         tests against committed golden files (no torch)"
	@echo "make test-parity  tests against live transformers on torch"
	@echo "make lint         ruff and mypy"
	@echo "make check        lint, test, test-parity: what CI runs"
	@echo "make reproduce    the AdaptiveLLM paper's evaluation, simulated"
	@echo "make bench        throughput and scheduler benchmarks of this machine"

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

$(VENV)/.installed-parity: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --editable ".[parity]"
	touch $@

demo: $(VENV)/.installed
	$(BIN)/jaxllm generate --input scripts/demo_prompts.txt --text --max-tokens 48 --temperature 0.5 --seed 0

test: $(VENV)/.installed-dev
	$(PYTEST) tests --ignore=tests/parity -n $(TEST_JOBS)

test-parity: $(VENV)/.installed-parity
	$(PYTEST) tests/parity

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test test-parity

bench: $(VENV)/.installed-dev
	mkdir -p out
	$(BIN)/python scripts/bench_scheduler.py --out out/scheduler.json
	$(BIN)/jaxllm bench throughput --num-prompts 64 --input-len 8:64 --output-len 16:64 --output out/throughput.json

reproduce: $(VENV)/.installed-dev
	$(BIN)/python scripts/reproduce_paper.py --out-dir out/paper

clean:
	rm -rf $(VENV) build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
