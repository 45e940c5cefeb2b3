# make train   sets everything up (the first time) and trains the built-in job; ARGS="--sync async" turns the dial
# make test    lint, types and all tests, on a clean clone too (makes .venv first)
# make test-long   the long sweeps, which make test leaves out
# make bench   the throughput table against the benchmark's peers
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
STAMP  := $(VENV)/.setup-done
# Processes that test at once; most tests start two to four more.
JOBS   ?= 3
# Tests start hundreds of processes: none compiles what another has.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup train test test-long lint types format bench clean

setup: $(STAMP)

# The build backend comes first and under the same constraints, so that nothing unpinned is ever installed.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; set PYTHON=") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation --editable '.[dev,bench,cluster]'
	@touch $@

train: setup
	@$(BIN)/syncline train $(ARGS)

test: lint types
	$(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

test-long: setup
	$(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m long

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tools.language

types: setup
	$(BIN)/mypy src

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/python -m benchmarks.bench_throughput

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
