PYTHON ?= python3
VENV ?= .venv
DATA ?= data
CACHE ?= .cache
PROBLEMS := higgs svhn mnist mnist-4096 higgs-full
BIN := $(VENV)/bin

.PHONY: demo test lint types unit results readme clean

# "make demo" and "make test" work from nothing: python3 with venv is all they need.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: $(VENV)/ready
	$(BIN)/python -m examples.digits

test: lint types unit

lint: $(VENV)/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/ready
	$(BIN)/mypy

unit: $(VENV)/ready
	$(BIN)/python -m pytest

# The figures in README and docs: real data under DATA, an hour or two on a quiet machine.
results: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	$(BIN)/python -m benchmarks.bregman --data-dir $(DATA) --out benchmarks/results/bregman.json
	$(BIN)/python -m benchmarks.kernels --out benchmarks/results/kernels.json
	$(BIN)/python -m benchmarks.steps --out benchmarks/results/steps.json
	$(BIN)/python -m benchmarks.ablation --data-dir $(DATA) --cache-dir $(CACHE) --out benchmarks/results/ablation.json
	$(BIN)/python -m benchmarks.memory --folder $(CACHE)/rows --out benchmarks/results/memory.json
	for p in $(PROBLEMS); do $(BIN)/python -m benchmarks.time_to_accuracy --data-dir $(DATA) --cache-dir $(CACHE) \
		--problems $$p --out benchmarks/results/time_to_accuracy_$$p.json || exit; done
	$(MAKE) readme

readme: $(VENV)/ready
	$(BIN)/python -m benchmarks.readme

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
