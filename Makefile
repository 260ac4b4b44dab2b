PYTHON ?= python3
VENV ?= .venv
DATA ?= data
CACHE ?= .cache
PROBLEMS := higgs svhn mnist mnist-4096 higgs-full
BIN := $(VENV)/bin
PREPARE := $(BIN)/python -m torch_admm data prepare
THERE := --data-dir $(DATA) --out $(CACHE)/prepared --offline

.PHONY: demo test lint types unit results compared readme clean

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
# What is in baselines/results already is not measured again: remove a problem's folder to start it anew.
results: $(VENV)/ready compared
	$(BIN)/python -m benchmarks.bregman --data-dir $(CACHE)/prepared --out benchmarks/results/bregman.json
	$(BIN)/python -m benchmarks.kernels --out benchmarks/results/kernels.json
	$(BIN)/python -m benchmarks.steps --out benchmarks/results/steps.json
	$(BIN)/python -m benchmarks.ablation --data-dir $(CACHE)/prepared --out benchmarks/results/ablation.json
	$(BIN)/python -m benchmarks.accelerations --data-dir $(CACHE)/prepared --out benchmarks/results/accelerations.json
	$(BIN)/python -m benchmarks.other_data --out benchmarks/results/other_data.json
	$(BIN)/python -m benchmarks.data --data-dir $(DATA) --out benchmarks/results/data.json
	$(BIN)/python -m benchmarks.scaling --out benchmarks/results/scaling.json
	$(BIN)/python -m benchmarks.sums --out benchmarks/results/sums.json
	$(BIN)/python -m benchmarks.ranks --data-dir $(CACHE)/prepared --out benchmarks/results/ranks.json
	$(BIN)/python -m benchmarks.simulate --data-dir $(CACHE)/prepared --out benchmarks/results/simulate.json --plot docs/simulate.png
	$(BIN)/python -m benchmarks.memory --folder $(CACHE)/rows --out benchmarks/results/memory.json
	$(BIN)/python -m benchmarks.baselines --data-dir $(CACHE)/prepared --out benchmarks/results/baselines.json
	$(MAKE) readme

# The comparison alone: HIGGS, SVHN and MNIST are prepared from the files under DATA, methods tuned and compared.
compared: $(VENV)/ready
	$(PREPARE) higgs $(THERE) --train $(DATA)/higgs/HIGGS_train_41654.csv.gz --test $(DATA)/higgs/HIGGS_test_5000.csv.gz
	$(PREPARE) svhn $(THERE) --train $(DATA)/svhn/train_02_32x32.mat --test $(DATA)/svhn/test_02_32x32.mat
	$(PREPARE) mnist $(THERE)
	$(BIN)/python -m benchmarks.time_to_accuracy --data-dir $(CACHE)/prepared --problems $(PROBLEMS)
	$(MAKE) readme

readme: $(VENV)/ready
	$(BIN)/python -m benchmarks.readme

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
