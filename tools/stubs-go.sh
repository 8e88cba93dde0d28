#!/usr/bin/env bash
# Makes the Go stubs of what clients speak from the protos; with --check, fails when the committed ones are stale.
# Needs protoc-gen-go and protoc-gen-go-grpc, as Debian 12 has them.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${VENV:-.venv}/bin
module=kvloop/clients/go
out=clients/go
[ "${1:-}" != --check ] || { out=$(mktemp -d); trap 'rm -rf "$out"' EXIT; }
shopt -s nullglob
protos=()
for name in errors attach router_service sampling turn chat chat_service; do   # workers' protos are no client's affair
  protos+=(protos/kvloop/v1alpha1/$name.prot[o])
done
options=(--go_opt=module=$module --go-grpc_opt=module=$module)
for f in protos/kvloop/v1alpha1/*.proto; do
  for plugin in go go-grpc; do
    options+=("--${plugin}_opt=M${f#protos/}=$module/kvloopv1alpha1")
  done
done
mkdir -p "$out/kvloopv1alpha1"
"$bin/python" -m grpc_tools.protoc -I protos --go_out="$out" --go-grpc_out="$out" "${options[@]}" "${protos[@]}"
# The compiler's version says nothing about the stubs.
sed -i '/^\/\/ \tprotoc  *v/d; /^\/\/ - protoc  *v/d' "$out"/kvloopv1alpha1/*.pb.go
[ "$out" = clients/go ] || diff -r "$out/kvloopv1alpha1" clients/go/kvloopv1alpha1 >/dev/null || {
  echo "stale Go stubs: run make stubs-go"; exit 1; }
