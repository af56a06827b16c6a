SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-compose lint bench soak clean

# The default model is on disk after the set-up, and everything else that these targets load they make themselves.
export HF_HUB_OFFLINE := 1

BIN := .venv/bin

help: ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 20

setup: ## system libraries, .venv, pinned packages, the default model; a second run takes a second
	@.ci/setup

demo: setup ## start both services, ask a few questions, show how each hand-over went
	@$(BIN)/python -m tests.demo

test: setup ## the whole test suite, as CI runs it
	@$(BIN)/python -m pytest $(ARGS)

test-compose: setup ## the containers: build, start, burst, stop; brings a Docker engine up where none runs
	@trap 'compose/engine down' EXIT; compose/engine up && $(BIN)/python -m pytest -m compose tests/compose $(ARGS)

lint: setup ## ruff, mypy, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup ## tables of goodput, latency and throughput, one JSON line at the end
	@$(BIN)/python -m tests.bench

soak: setup ## the long cases in real time; not part of CI
	@$(BIN)/python -m pytest -m soak $(ARGS)

clean: ## remove what the targets made in this folder; the default model's cache stays
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
