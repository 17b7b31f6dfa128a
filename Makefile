# Everything starts with set-up, which is skipped when done. `make help` lists the targets.
SHELL := /bin/bash
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
# Tests wait a lot: one process more than there are cores, but no more than the disk has room for.
TEST_PROCESSES ?= $(shell n=$$(nproc); echo $$((n < 8 ? n + 1 : 8)))
FUZZ_ITERATIONS ?= 20000

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-ecosystem lint floors sanitize check fuzz bench bench-save clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' Makefile

setup: ## system packages, .venv and the extension; skipped in under a second when done
	@bash tests/setup.sh

demo: setup ## train a small model, store its checkpoints, mount them, load and compare every one
	$(BIN)/python -m tests.demo

test: setup ## the whole test suite
	$(PYTEST) -n $(TEST_PROCESSES) --dist worksteal

test-slow: setup ## the tests that take long; installs the suites of programs that they run
	@bash tests/setup.sh suites
	$(PYTEST) -m slow

test-ecosystem: setup ## save and load with transformers, peft, accelerate, Lightning, torch.distributed and others
	$(BIN)/python -m pip install --quiet -e '.[dev,ecosystem]'
	$(PYTEST) tests/ecosystem

lint: setup ## ruff, formatting and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

floors: setup ## no module imports upwards
	$(PYTEST) -q tests/test_floors.py

sanitize: setup ## the C code and its tests under address and undefined-behaviour sanitizers
	bash tests/codec/fuzz/run.sh $(FUZZ_ITERATIONS)
	bash tests/codec/fuzz/pytest_asan.sh

check: lint floors sanitize ## lint, floors, sanitize

fuzz: FUZZ_ITERATIONS := 2000000
fuzz: setup ## a long run of the C fuzz driver and of the property tests
	bash tests/codec/fuzz/run.sh $(FUZZ_ITERATIONS)
	$(PYTEST) --hypothesis-profile=soak --timeout=3600 tests/codec tests/formats

bench: setup ## ratios and speeds beside plain files, zstd, zipnn and moonclip
	$(BIN)/python -m pip install --quiet -e '.[bench]'
	$(BIN)/python -m tests.bench.codec_bench
	$(BIN)/python -m tests.bench.store_bench
	$(BIN)/python -m tests.bench.mount_bench
	$(BIN)/python -m tests.bench.write_bench
	$(BIN)/python -m tests.bench.encode_bench
	$(BIN)/python -m tests.bench.train_bench

bench-save: setup ## saves and loads beside torch.save, safetensors and moonclip: held, durable, bytes, load, memory
	$(BIN)/python -m pip install --quiet -e '.[bench]'
	$(BIN)/python -m tests.bench.save_bench

clean: ## remove everything that set-up, tests and builds made
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis moonclipfs/*.so ext/_*.c
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
