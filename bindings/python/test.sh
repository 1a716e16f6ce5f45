#!/bin/sh
# Runs the tests of the Python package: with the Python at hand where it has PyTorch, else with one of its own in
# build/python-venv, made once. Usage: bindings/python/test.sh [option of pytest]...
# FLASHBACK_LIB names the shared library; without it that of build/release, ci or dev is taken.
set -eu
cd "$(dirname "$0")/../.."
venv=build/python-venv
python=python3
needs="torch, numpy, pytest, transformers, onnx, ml_dtypes"

has_all() {
    "$1" -c "import $needs" >/dev/null 2>&1
}

if ! has_all "$python"; then
    python=$venv/bin/python
    if ! has_all "$python"; then
        tools/setup.sh python
        python3 -m venv "$venv"
        "$venv/bin/pip" install --quiet torch==2.13.0 numpy pytest transformers onnx ml_dtypes || {
            echo "test.sh: PyTorch and the rest of what the tests need cannot be had here; they are skipped" >&2
            exit 0
        }
        # An oracle of one test file, which is skipped without it: there is none for some machines.
        "$venv/bin/pip" install --quiet "mlx[cpu]" || echo "test.sh: mlx cannot be had here; its tests are skipped" >&2
    fi
fi
PYTHONDONTWRITEBYTECODE=1 exec "$python" -m pytest -p no:cacheprovider bindings/python/tests "$@"
