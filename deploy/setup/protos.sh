#!/usr/bin/env bash
# Regenerates protos/gen from protos/. With --check, regenerates elsewhere and fails on a difference.
set -euo pipefail
cd "$(dirname "$0")/../.."
bin=.venv/bin
out=protos/gen
if [ "${1:-}" = "--check" ]; then
    out=$(mktemp -d)
    trap 'rm -rf "$out"' EXIT
fi
mapfile -t files < <(cd protos && find . -name '*.proto' -not -path './gen/*' | sed 's|^\./||' | sort)
rm -rf "$out"
mkdir -p "$out"
PATH="$PWD/$bin:$PATH" "$bin/python" -m grpc_tools.protoc -Iprotos \
    --python_out="$out" --grpc_python_out="$out" --mypy_out="quiet:$out" --mypy_grpc_out="quiet:$out" \
    "${files[@]}"
find "$out" -type d -exec touch {}/__init__.py \;
rm -f "$out/__init__.py"
if [ "${1:-}" = "--check" ]; then
    diff -r -x __pycache__ "$out" protos/gen >/dev/null || {
        echo "protos/gen is not what protos/ generates: run 'make protos' and commit" >&2
        exit 1
    }
fi
