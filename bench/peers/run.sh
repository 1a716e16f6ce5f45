#!/bin/sh
# Runs peers.py with a Python that has PyTorch: the one at hand, else one of its own in build/peers-venv, made once.
# Usage: bench/peers/run.sh [option of peers.py]...
set -eu
cd "$(dirname "$0")/../.."
venv=build/peers-venv
python=python3

has_torch() {
    "$1" -c 'import torch' >/dev/null 2>&1
}

if ! has_torch "$python"; then
    python=$venv/bin/python
    if ! has_torch "$python"; then
        tools/setup.sh peers
        python3 -m venv "$venv"
        "$venv/bin/pip" install torch==2.13.0 numpy
    fi
fi
exec "$python" bench/peers/peers.py "$@"
