# Every target makes .venv and installs what it needs; the second time that takes no time.
PYTHON ?= python3
BIN := .venv/bin
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help demo test test-all chaos lint docs lock bench clean

help:
	@echo "make demo      the main job on real novels, a few minutes"
	@echo "make test      the tests; make test-all adds the slow ones; make lint checks style and types"
	@echo "make chaos     faults, bad input, untrusted files and load, on purpose; one to two hours; its tables go to benchmarks/RESULTS.md"
	@echo "make lock      requirements.lock: every package with its hash"
	@echo "make docs      docs/configuration.md, made from the dataclasses"
	@echo "make bench     side by side with peers, two to four hours; writes benchmarks/results/ and benchmarks/speed.png"

demo: .venv/installed-core
	@TRIPTYCH=$(BIN)/triptych sh demo.sh

test: .venv/installed-test
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

test-all: .venv/installed-test
	$(BIN)/python -m pytest -n 2 --dist loadfile

chaos: .venv/installed-test
	$(BIN)/python -m chaos --save

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/installed-core
	$(BIN)/python -m docs.reference

lock: .venv/installed-test
	$(BIN)/python -m chaos.lock

# make bench NOVELS=folder HELD_OUT="'*treasure-island*'" measures on other novels than the catalogue's
NOVELS = novels-gutenberg
HELD_OUT = carroll-alice
bench: DATA = --data $(NOVELS) --held_out $(HELD_OUT)
bench: .venv/installed-bench
	$(BIN)/python -m benchmarks.store --data $(NOVELS) --repeat 5
	$(BIN)/python -m benchmarks.tokenizer $(DATA)
	$(BIN)/python -m benchmarks.training --compile --profile
	$(BIN)/python -m benchmarks.training --micro_batch 4 --json benchmarks/results/training-parts.json
	$(BIN)/python -m benchmarks.generation --rounds 9 --compile --profile
	$(BIN)/python -m benchmarks.growth $(DATA)
	$(BIN)/python -m benchmarks.startup $(DATA)
	for family in decoder encoder encoder-decoder; do $(BIN)/python -m benchmarks.quality $(DATA) --family $$family || exit; done
	$(BIN)/python -m benchmarks.endtoend $(DATA)
	$(BIN)/python -m benchmarks.picture

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "needs Python 3.11 or newer: make PYTHON=python3.11 …"; exit 2; }
	$(PYTHON) -m venv .venv

.venv/installed-core: pyproject.toml | .venv/bin/python
	$(INSTALL) -e .
	@touch $@

.venv/installed-%: pyproject.toml | .venv/bin/python
	$(INSTALL) -e '.[$*]'
	@touch $@
