#!/usr/bin/env bash
# The whole suite: the crates, the light services without torch, then what needs the engine extra.
# Arguments go to pytest in place of all that: test.sh services/lb -k bucket
set -euo pipefail
cd "$(dirname "$0")/../.."
bin=$PWD/.venv/bin
step() { printf '\033[1m==>\033[0m %s\n' "$*"; }
needs_torch=(
    services/engine/model services/engine/training services/engine/evaluation/tests/test_drift.py
    tests/engine kernels
)

if [ $# -gt 0 ]; then
    exec "$bin/python" -m pytest "$@"
fi
step "Rust"
cargo test -q --locked --workspace --profile fast
step "Python: everything but the network"
"$bin/python" -m pytest services tests "${needs_torch[@]/#/--ignore=}"
deploy/setup/install.sh engine
step "Python: the network and its kernels"
gpu=()
[ -e /dev/nvidia0 ] || gpu=(-m "not gpu") # a further check where there is one
"$bin/python" -m pytest "${needs_torch[@]}" "${gpu[@]}"
