#!/usr/bin/env bash
# The whole suite: both crates, then Python. Ends with pytest's own summary.
set -euo pipefail
cd "$(dirname "$0")/../.."
bin=$PWD/.venv/bin
step() { printf '\033[1m==>\033[0m %s\n' "$*"; }

step "Rust"
cargo test -q --locked --workspace --profile fast
step "Python"
exec "$bin/python" -m pytest "$@"
