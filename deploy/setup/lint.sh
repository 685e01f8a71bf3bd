#!/usr/bin/env bash
# Every check that needs no running service.
set -euo pipefail
cd "$(dirname "$0")/../.."
bin=$PWD/.venv/bin
step() { printf '\033[1m==>\033[0m %s\n' "$*"; }

step "layout and lint: Python"
"$bin/ruff" format --check -q .
"$bin/ruff" check -q .
step "types"
"$bin/mypy" --no-error-summary services/common
if "$bin/python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)'; then
    "$bin/mypy" --no-error-summary services/engine/model kernels # needs the engine extra
fi
step "contracts"
"$bin/buf" lint
"$bin/buf" format --diff --exit-code >/dev/null || { echo "buf format -w changes files" >&2; exit 1; }
"$bin/buf" breaking --against protos/contract.binpb
deploy/setup/protos.sh --check
step "layout and lint: Rust"
cargo fmt --all --check
cargo clippy -q --locked --workspace --all-targets -- -D warnings
cargo clippy -q --locked --workspace --features pelagos-codec/python,pelagos-kv-native/python,pelagos-kernels/python -- -D warnings
echo "lint: clean"
