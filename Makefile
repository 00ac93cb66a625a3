# `make run` and `make test` need nothing but Python 3.11 or newer (and make); everything else they set up.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Where it is set, every process compiles all its sources again: half a second each.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup run redis browser test test-extended test-lmcache test-mooncake lint types check bench docs clean

help:  ## show this
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; call make with PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { echo "python venv is missing: apt-get install python3-venv"; exit 1; }
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	$(BIN)/conductor warm
	@touch $@

setup: $(STAMP)  ## virtual environment, dependencies, compiled kernels

run: setup  ## the front door on port 8000 over an emulated cluster (ARGS="--emulate 4 --port 9000" to change)
	$(BIN)/conductor serve --emulate 2p2d --port 8000 $(ARGS)

redis:  ## redis-server, for tests of shared state (Debian; needs root)
	@command -v redis-server >/dev/null || { [ "$$(id -u)" = 0 ] || { echo "redis-server is missing: apt-get install redis-server"; exit 1; }; \
	  apt-get update -qq && apt-get install -qq -y --no-install-recommends redis-server; }

browser:  ## Chromium, for tests of the console and of reports (Debian; needs root)
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] || { echo "chromium is missing: apt-get install chromium"; exit 1; }; \
	  apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium; }

test: setup  ## the test suite, in three processes: many tests wait
	@$(MAKE) --keep-going --silent --no-print-directory redis browser || echo "the tests that need them are skipped"
	$(BIN)/pytest --numprocesses 3 --dist loadscope -m 'not extended' $(ARGS)

test-extended: setup  ## faults, restarts and scale that take half a minute each, one after the other
	$(BIN)/pytest -m extended $(ARGS)

test-lmcache: setup .venv-lmcache/.installed  ## against real LMCache servers, in a virtual environment of their own
	LMCACHE_BIN=.venv-lmcache/bin $(BIN)/pytest -m lmcache tests/conductor/executors tests/end_to_end $(ARGS)

.venv-lmcache/.installed:
	$(PYTHON) -m venv .venv-lmcache
	.venv-lmcache/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-lmcache/bin/pip install --quiet --disable-pip-version-check lmcache==0.5.6
	@touch $@

test-mooncake: .venv-mooncake/.installed  ## against a real Mooncake master (Debian: libibverbs1 librdmacm1 libnuma1)
	MOONCAKE_BIN=.venv-mooncake/bin .venv-mooncake/bin/pytest -m mooncake tests/conductor/executors $(ARGS)

.venv-mooncake/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-mooncake
	.venv-mooncake/bin/pip install --quiet --disable-pip-version-check --editable '.[dev,mooncake]'
	@touch $@

lint: setup  ## format and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup  ## strict types of the packages
	$(BIN)/mypy

check: lint types  ## lint, types and the fast tests
	$(BIN)/pytest -m 'not slow' -q

bench: setup  ## every benchmark, quick
	for script in benchmarks/*.py; do $(BIN)/python $$script --quick || exit 1; done

docs: setup  ## the pages under docs as a site, in build/docs
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[docs]'
	$(BIN)/mkdocs build --strict --quiet

clean:  ## remove what setup made
	rm -rf $(VENV) .venv-lmcache .venv-mooncake build .mypy_cache .pytest_cache .ruff_cache .hypothesis
