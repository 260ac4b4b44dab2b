PYTHON ?= python3
VENV ?= .venv
DATA ?= data
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

# The figures in README: real data under DATA, some minutes on a quiet machine.
results: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,images]"
	$(BIN)/python -m benchmarks.bregman --data-dir $(DATA) --out benchmarks/results/bregman.json
	$(BIN)/python -m benchmarks.kernels --out benchmarks/results/kernels.json
	$(MAKE) readme

readme: $(VENV)/ready
	$(BIN)/python -m benchmarks.readme

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
