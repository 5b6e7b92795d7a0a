# Two commands on a fresh machine: `make demo` and `make test`. Each makes .venv as it needs it.
# `make test` holds every promise of docs/concepts/promises.md; `make test-all` runs the whole suite.
PYTHON ?= python3
BIN := .venv/bin
# Processes of the suite: most tests use one core, some start ranks of their own, and many wait. So three
# are quicker than two on two cores, by a seventh.
WORKERS ?= 3
# Those of the tests on a GPU, which mostly compile kernels.
GPU_WORKERS ?= 6
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-all lint wheel budgets bench gpu bench-gpu

demo: .venv/installed
	$(BIN)/python scripts/demo.py

test: .venv/installed-test
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow" $(PYTEST_ARGS)

test-all: .venv/installed-test
	$(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

lint: .venv/installed-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# Compiles all kernels for sm_80 and sm_90, and keeps the hashes of their sources where none is over its budget: the
# suite then compiles a handful, until a source changes. Takes minutes; commit the file that it writes.
budgets: .venv/installed-test
	$(BIN)/python tests/kernels/budgets_seen.py --compile

# dist/mtcli-VERSION-py3-none-any.whl, to install elsewhere.
wheel: .venv/made
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

# Every benchmark of a CPU, into one JSON file of benchmarks/results. BENCH_ARGS=--resume goes on with an interrupted
# one, and BENCH_ARGS=--tiny tries every script in seconds each.
bench: .venv/installed-test
	$(BIN)/python benchmarks/run.py $(BENCH_ARGS)

# What needs a GPU: the kernels' and the engines' tests on one. They are skipped without.
gpu: .venv/installed-test
	$(BIN)/python -c 'import torch; assert torch.cuda.is_available(), "this machine shows torch no GPU"'
	$(BIN)/python -m pytest -n $(GPU_WORKERS) -m gpu $(PYTEST_ARGS)

# Chooses the kernels' configurations on this machine's GPU, then measures kernels and training steps into
# benchmarks/results; without a GPU it says so. BENCH_ARGS='--budget 540' stops in time, and the next run goes on.
bench-gpu: .venv/installed-test
	$(BIN)/python benchmarks/gpu/run.py $(BENCH_ARGS)

# Stamps, so that nothing is installed twice. The demo needs less than the tests.
.venv/installed: .venv/made pyproject.toml constraints.txt
	$(INSTALL) -e '.[data,report]'
	touch $@

.venv/installed-test: .venv/made pyproject.toml fused/pyproject.toml constraints.txt
	$(INSTALL) -e '.[test]' -e ./fused
	touch $@ .venv/installed

.venv/made:
	$(PYTHON) -m venv .venv
	touch $@
