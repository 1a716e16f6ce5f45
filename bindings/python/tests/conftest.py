"""Which library is tested, what is skipped and why, and the random numbers.

FLASHBACK_LIB names the shared library; without it that of a build folder is taken (build/release, ci or dev), and
without that the one of the installed package. `-m cuda` runs what needs a GPU, `-m long` the grids that take minutes.
"""

import ctypes
import importlib.util
import math
import os
import pathlib
import sys
import zlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait leave the cores to others

if "FLASHBACK_LIB" not in os.environ:
    built = [ROOT / "build" / preset / "libflashback.so" for preset in ("release", "ci", "dev")]
    for path in [p for p in built if p.exists()][:1]:
        os.environ["FLASHBACK_LIB"] = str(path)


def need(name, why):
    """The module, or a skipped test with its reason."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{why} needs the package {name}, which is not installed; bindings/python/test.sh installs it")
    return importlib.import_module(name)


@pytest.fixture
def rng(request):
    """Random numbers that are new in every run; the seed is printed, and FLASHBACK_SEED repeats it."""
    numpy = need("numpy", "this test")
    seed = int(os.environ.get("FLASHBACK_SEED", int.from_bytes(os.urandom(4), "little")))
    print(f"FLASHBACK_SEED={seed}")
    return numpy.random.default_rng([seed, zlib.crc32(request.node.name.encode())])


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    """A device of PyTorch's."""
    torch = need("torch", "this test")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("this test needs an NVIDIA GPU, and PyTorch sees none")
    return request.param


@pytest.fixture
def one_thread():
    """PyTorch on one thread: what is tiny is faster so, beside other programs by much."""
    torch = need("torch", "this test")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def poison(request, monkeypatch):
    """NaN in every result and in the workspace before a call: what is not written, or read before it is, shows."""
    if importlib.util.find_spec("numpy") is None or request.node.get_closest_marker("unpoisoned"):
        return
    from flashback_attention import _arrays, _engine

    workspace = _engine.cpu_workspace

    def filled_workspace(size):
        keep, address = workspace(size)
        ctypes.memset(address, 0xFF, size)
        return keep, address

    def filled(place):
        return place._replace(fill=math.nan) if place.fill is None else place

    monkeypatch.setattr(_engine, "cpu_workspace", filled_workspace)
    kinds = [_arrays.Arrays]
    if "torch" in sys.modules:
        from flashback_attention import _torch

        kinds.append(_torch.Tensors)
    for kind in kinds:
        plain = kind.empty
        monkeypatch.setattr(kind, "empty", staticmethod(lambda place, like, plain=plain: plain(filled(place), like)))
