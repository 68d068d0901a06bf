# make demo    build .venv, then train one real model twice: without and with scheduling
# make test    build .venv, then run lint, types, unit, property and multi-process tests
# make venv    build .venv with everything that the tests need, Horovod included
# make byteps  build BytePS, for its tests only (several minutes, once, kept in the user's cache)
# make test-byteps  run them: real scheduler, server and workers (root; a minute)
# make lint | test-fast | test-multiprocess | clean

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

# Stamps: what they stand for is rebuilt when what they depend on has changed.
PACKAGES := $(VENV)/.packages
HOROVOD := $(VENV)/.horovod

.PHONY: help demo test venv lint test-fast test-multiprocess byteps test-byteps clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: $(PACKAGES)
	$(BIN)/python -m benchmarks demo

test: lint test-fast test-multiprocess

# pyright follows the imports of every engine, Horovod too.
lint: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

test-fast: $(PACKAGES)
	$(BIN)/python -m pytest -m "not multiprocess"

# Two files at a time, since each waits for its processes most of the time. They have time limits,
# which a busy machine may miss: what failed gets one more try, alone.
test-multiprocess: venv
	$(BIN)/python -m pytest -m multiprocess -n 2 --dist loadfile --durations 15 || \
		$(BIN)/python -m pytest -m multiprocess --last-failed --last-failed-no-failures none

venv: $(HOROVOD)

byteps: venv
	$(BIN)/python scripts/build_byteps.py

test-byteps: byteps
	$(BIN)/python -m pytest tests/engines/test_byteps.py \
		tests/scripts/test_run_byteps.py tests/transports -k byteps

$(PACKAGES): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "needs $(PYTHON); name another: make PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools wheel
	$(BIN)/python -m pip install --constraint constraints.txt --no-build-isolation --editable '.[all,dev]'
	touch $@

$(HOROVOD): $(PACKAGES) scripts/build_horovod.py scripts/wheel_cache.py scripts/system_packages.sh
	scripts/system_packages.sh
	$(BIN)/python scripts/build_horovod.py
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
