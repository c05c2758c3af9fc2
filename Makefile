# `make` says what there is. Every target may be run again at any time; only plain python3 (3.11+) and make are needed.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
SEED ?= 1
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

DISTRIBUTIONS := clients/python/stubs clients/python/sdk libs/chassis libs/codec \
	services/sandbox services/driver services/interception services/inference
TYPED := libs services clients/python/sdk tests $(shell find protos examples benchmarks docs -name "*.py" 2>/dev/null)
REQUIREMENTS := requirements-dev.txt $(wildcard examples/*/requirements.txt)
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: help
help: ## say what there is
	@grep -hE '^[a-z][a-z-]*:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

.PHONY: demo
demo: $(STAMP) ## train a small model by GRPO through all four services (SEED=n repeats a run)
	@$(BIN)/python examples/grpo/train.py --seed $(SEED)

.PHONY: test
test: lint ## everything: lint, types, protos, layering, then all tests
	@echo "== tests"
	@$(BIN)/python -m pytest

.PHONY: lint
lint: $(STAMP) ## style, types, protos and layering
	@echo "== ruff"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check . || { echo "run: $(BIN)/ruff format ."; exit 1; }
	@echo "== buf"
	@$(BIN)/buf lint
	@echo "== generated code"
	@$(BIN)/python protos/generate.py --check
	@echo "== layering"
	@$(BIN)/lint-imports --no-cache >$(VENV)/layering.log || { cat $(VENV)/layering.log; exit 1; }
	@echo "== mypy"
	@$(BIN)/mypy $(TYPED)

.PHONY: protos
protos: $(STAMP) ## generate the Python stubs from protos/
	@$(BIN)/python protos/generate.py

.PHONY: bench
bench: $(STAMP) ## measure; docs/benchmarks.md says what the figures mean
	@$(BIN)/python -m benchmarks

.PHONY: docs
docs: $(STAMP) ## check that the documentation's links lead somewhere
	@$(BIN)/python docs/check.py

.PHONY: clean
clean: ## remove the environment, caches and runs
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist runs
	@find . -name __pycache__ -not -path './node_modules/*' -prune -exec rm -rf {} +

# One environment for everything. The build backend comes first, so that the editable installs need no isolated builds.
$(STAMP): constraints.txt $(REQUIREMENTS) $(addsuffix /pyproject.toml,$(DISTRIBUTIONS))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Penstock needs Python 3.11 or newer; try: make PYTHON=python3.12")'
	@echo "== installing into $(VENV) (once)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt hatchling editables
	@$(PIP) install --no-build-isolation -c constraints.txt $(addprefix -r ,$(REQUIREMENTS)) $(addprefix -e ./,$(DISTRIBUTIONS))
	@touch $@
