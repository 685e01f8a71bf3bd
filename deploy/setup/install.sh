#!/usr/bin/env bash
# Installs into the checkout; does nothing that was done before. Usage: install.sh light|engine
set -euo pipefail
cd "$(dirname "$0")/../.."
what=${1:-light}
stamps=.venv/.pelagos
say() { printf '\033[1m==>\033[0m %s\n' "$*" >&2; }
digest() { cat "$@" | sha256sum | cut -c1-16; }

python=""
for candidate in python3.11 python3.12 python3.13 python3; do
    if command -v "$candidate" >/dev/null &&
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
[ -n "$python" ] || { echo "Python 3.11 or newer is needed" >&2; exit 1; }
command -v cargo >/dev/null || { echo "a Rust toolchain (cargo) is needed to build the native parts" >&2; exit 1; }

# A virtual environment carries its own path: one that was moved or copied is made again.
if [ -x .venv/bin/python ] && ! [ "$(.venv/bin/python -c 'import sys; print(sys.prefix)' 2>/dev/null)" -ef .venv ]; then
    rm -rf .venv
fi
if ! [ -x .venv/bin/python ]; then
    say "making .venv"
    "$python" -m venv .venv
fi
mkdir -p "$stamps"
if ! [ -x .venv/bin/uv ]; then
    .venv/bin/python -m pip install -q --disable-pip-version-check uv==0.13.9
fi
uv() { VIRTUAL_ENV="$PWD/.venv" .venv/bin/python -m uv "$@"; }

install_lock() { # name, lock file, what it loads
    local stamp="$stamps/$1" want
    want=$(digest "$2")
    [ "$(cat "$stamp" 2>/dev/null || true)" = "$want" ] && return
    say "installing $3"
    uv pip install -q --require-hashes -r "$2"
    echo "$want" >"$stamp"
}

install_lock core deploy/locks/core.lock "the light services and their tests (about 100 MB to load)"
if [ "$what" = engine ]; then
    install_lock engine deploy/locks/engine.lock "the engine extra: torch and kernel compilers (about 3 GB to load, 5.4 GB on disk)"
fi

# The package itself, editable, with its native crates.
want=$(find services/*/codec services/*/native kernels/*/native Cargo.toml Cargo.lock pyproject.toml -type f \
    \( -name '*.rs' -o -name '*.toml' -o -name '*.lock' -o -name '*.json' \) -not -path '*/target/*' -print0 |
    sort -z | xargs -0 cat | sha256sum | cut -c1-16)
if [ "$(cat "$stamps/package" 2>/dev/null || true)" != "$want" ] ||
    ! .venv/bin/python -c 'import importlib.util as u; import services.recipe._codec, services.kvstore._native; assert u.find_spec("kernels.cpu._native")' 2>/dev/null; then
    say "building the native parts"
    uv pip install -q --no-deps --no-build-isolation --reinstall-package pelagos -e .
    echo "$want" >"$stamps/package"
fi

if ! [ -f build/tokenizer/tokenizer-v41.json ]; then
    say "building the tokenizer file"
    .venv/bin/python -m services.recipe.make_tokenizer build/tokenizer
fi

# etcd: the machine's own, or Debian's package unpacked into .local (needs no root).
if ! command -v etcd >/dev/null && ! [ -x .local/bin/etcd ]; then
    say "loading etcd into .local"
    mkdir -p .local/bin .local/etcd
    if command -v apt-get >/dev/null && (cd .local/etcd && apt-get download -q etcd-server >/dev/null 2>&1 &&
        dpkg -x etcd-server_*.deb . && ln -sf ../etcd/usr/bin/etcd ../bin/etcd); then
        :
    else
        echo "etcd was not found and could not be loaded: install the package etcd-server" >&2
        exit 1
    fi
fi
