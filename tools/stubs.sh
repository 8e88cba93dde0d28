#!/usr/bin/env bash
# Makes the Python stubs from the protos; with --check, fails when the committed ones are stale.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${VENV:-.venv}/bin
out=protos
[ "${1:-}" != --check ] || { out=$(mktemp -d); trap 'rm -rf "$out"' EXIT; }
PATH="$PWD/$bin:$PATH" "$bin/python" -m grpc_tools.protoc -I protos \
  --python_out="$out" --mypy_out="quiet:$out" --grpc_python_out="$out" --mypy_grpc_out="quiet:$out" \
  protos/kvloop/v1alpha1/*.proto
for f in "$out"/kvloop/v1alpha1/*_pb2_grpc.py*; do   # files without a service have an empty gRPC stub
  [[ $f == *_service_pb2_grpc.py* ]] || rm "$f"
done
[ "$out" = protos ] || for f in "$out"/kvloop/v1alpha1/*; do
  cmp -s "$f" "protos/kvloop/v1alpha1/${f##*/}" || { echo "stale stub: ${f##*/}: run make stubs"; exit 1; }
done
