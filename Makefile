# Each target makes the environment it needs. PYTHON picks the interpreter (3.11 or newer).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
PYTHON_NEXT ?= python3.12
VENV_NEXT ?= .venv-next
TEST_JOBS ?= 2
OTHER_TESTS := clients combinations devices gpu_compile on_ray page parity processes

.PHONY: help demo test test-next test-devices test-processes test-combinations test-page test-cluster test-parity test-clients test-gpu-compile lint check docs bench soak reproduce clean

help:
	@echo "make demo         answer a batch of prompts with the embedded model"
	@echo "make test         tests against committed golden files (no torch)"
	@echo "make test-next    the same with the newest JAX that PYTHON_NEXT ($(PYTHON_NEXT)) has; not part of check"
	@echo "make test-devices engines on several devices, which a CPU counts as"
	@echo "make test-processes  engines over two processes"
	@echo "make test-combinations  every format of weights with every dtype of KV"
	@echo "make test-page    the server's live page in a headless Chromium, which has to be installed"
	@echo "make test-cluster several engines on a local Ray cluster: data sets, and a server"
	@echo "make test-clients the server under guidellm and lm-eval, unchanged"
	@echo "make test-parity  tests against live transformers on torch"
	@echo "make test-gpu-compile  compiles kernels and whole steps for GPUs that are not there"
	@echo "make lint         ruff, mypy, and which room may import which"
	@echo "make check        lint and all of these: what CI runs"
	@echo "make docs         the documentation as a site, in out/site"
	@echo "make reproduce    the AdaptiveLLM paper's evaluation, simulated"
	@echo "make soak         random traffic for MINUTES=30, each preset in turn"
	@echo "make bench        throughput and scheduler benchmarks of this machine"

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	touch $@

$(VENV)/.installed-page: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --editable ".[page]"
	touch $@

$(VENV)/.installed-parity: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --editable ".[parity]"
	touch $@

$(VENV)/.installed-clients: $(VENV)/.installed-parity
	$(BIN)/python -m pip install --quiet --editable ".[clients]"
	touch $@

$(VENV)/.installed-ray: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --editable ".[ray]"
	touch $@

# The CUDA compiler alone, in a folder of its own: only a GPU needs its dependencies, and only this target needs it.
CUDA_COMPILER := $(VENV)/cuda-compiler
$(CUDA_COMPILER)/.installed: $(VENV)/.installed-dev
	version=$$($(BIN)/python -c "import jax; print(jax.__version__)") && \
	$(BIN)/python -m pip install --quiet --no-deps --target $(CUDA_COMPILER) \
		jax-cuda12-plugin==$$version jax-cuda12-pjrt==$$version
	touch $@

demo: $(VENV)/.installed
	$(BIN)/jaxllm generate --input scripts/demo_prompts.txt --text --max-tokens 48 --temperature 0.5 --seed 0
	$(BIN)/python scripts/demo_conversation.py
	$(BIN)/python scripts/demo_pressure.py

test: $(VENV)/.installed-dev
	$(PYTEST) tests $(foreach group,$(OTHER_TESTS),--ignore=tests/$(group)) -n $(TEST_JOBS)

test-devices: $(VENV)/.installed-dev
	$(PYTEST) tests/devices -n $(TEST_JOBS)

test-processes: $(VENV)/.installed-dev
	$(PYTEST) tests/processes

test-combinations: $(VENV)/.installed-dev
	$(PYTEST) tests/combinations -n $(TEST_JOBS)

test-page: $(VENV)/.installed-page
	$(PYTEST) tests/page

test-next:
	$(MAKE) test PYTHON=$(PYTHON_NEXT) VENV=$(VENV_NEXT)

test-clients: $(VENV)/.installed-clients
	$(PYTEST) tests/clients

test-cluster: $(VENV)/.installed-ray
	$(PYTEST) tests/on_ray

test-parity: $(VENV)/.installed-parity
	TEST_XLA=default $(PYTEST) tests/parity

test-gpu-compile: $(CUDA_COMPILER)/.installed
	PYTHONPATH=$(CUDA_COMPILER) JAX_PLATFORMS=cpu $(PYTEST) tests/gpu_compile -n $(TEST_JOBS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests/typed_params.py
	rm -rf out/imports && mkdir -p out/imports
	cp -rL jaxllm pyproject.toml out/imports/ && touch out/imports/jaxllm/sched/__init__.py  # where it is a package
	cd out/imports && PYTHONPATH=. $(abspath $(BIN))/lint-imports

check: lint test test-devices test-processes test-combinations test-page test-cluster test-parity test-clients test-gpu-compile

# The theme's advertisement for its successor is none of our pages' warnings.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "open out/site/index.html"

bench: $(VENV)/.installed-dev
	mkdir -p out
	$(BIN)/python scripts/bench_scheduler.py --out out/scheduler.json --overwrite
	$(BIN)/jaxllm bench throughput --num-prompts 64 --input-len 8:64 --output-len 16:64 --output out/throughput.json \
		--overwrite

MINUTES ?= 30
soak: $(VENV)/.installed-dev
	$(BIN)/python scripts/soak.py --minutes $(MINUTES)

reproduce: $(VENV)/.installed-dev
	$(BIN)/python scripts/reproduce_paper.py --out-dir out/paper --overwrite

clean:
	rm -rf $(VENV) build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
