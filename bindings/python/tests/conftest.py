"""Which library is tested, what is skipped and why, and the random numbers.

FLASHBACK_LIB names the shared library; without it that of a build folder is taken (build/release, ci or dev), and
without that the one of the installed package. `-m cuda` runs what needs a GPU, `-m long` the grids that take minutes.
"""

import importlib.util
import os
import pathlib
import zlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]

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
