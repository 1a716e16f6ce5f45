"""The package as users get it: the wheel, import without anything else, the program, old PyTorch, what is
documented."""

import ast
import importlib.util
import inspect
import os
import pathlib
import re
import subprocess
import sys
import typing
import zipfile

import conftest
import flashback_attention as fa
import pytest

PACKAGE = conftest.ROOT / "bindings/python/flashback_attention"
MODULES = sorted(PACKAGE.glob("*.py"))


def python(code, **environment):
    """The output of a new Python that finds the package."""
    everything = dict(os.environ, PYTHONPATH=str(PACKAGE.parent), PYTHONDONTWRITEBYTECODE="1", **environment)
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, env=everything)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_alone():
    """Neither NumPy nor PyTorch is imported, or needed."""
    code = "import sys; sys.modules.update(dict.fromkeys(['torch', 'numpy'], None)); import flashback_attention as fa"
    assert python(code + "; print(fa.supported(1, 2, 3))").startswith(
        "(False, 'q is of type int, expected a NumPy array"
    )
    loaded = python("import sys, flashback_attention; print([m for m in ('torch', 'numpy') if m in sys.modules])")
    assert loaded.strip() == "[]"


def test_program():
    """python -m flashback_attention prints lines of `flashback info`."""
    environment = dict(os.environ, PYTHONPATH=str(PACKAGE.parent))
    done = subprocess.run(
        [sys.executable, "-m", "flashback_attention"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0 and done.stdout == fa.info() and f"version: {fa.__version__}\n" in done.stdout
    program = pathlib.Path(fa.get_library()).with_name("flashback")
    if program.exists():
        info = subprocess.run([program, "info"], capture_output=True, text=True, env=environment).stdout
        assert set(done.stdout.splitlines()) <= set(info.splitlines())


def test_library_not_found(tmp_path):
    """What is missing is said when the package is imported."""
    code = "import pytest\nwith pytest.raises(ImportError) as e:\n    import flashback_attention\nprint(e.value)"
    assert "is not at /nowhere/lib.so; expected" in python(code, FLASHBACK_LIB="/nowhere/lib.so")
    other = tmp_path / "lib.so"
    other.write_text("no library")
    assert "cannot be loaded" in python(code, FLASHBACK_LIB=str(other))


def test_version():
    """The header's version is the library's and the package's."""
    header = (conftest.ROOT / "include/flashback.h").read_text()
    assert fa.__version__ == ".".join(re.findall(r"#define FB_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header))


def test_old_torch():
    """Without torch.library.register_fake (before 2.4) autograd functions call the library themselves."""
    conftest.need("torch", "this test")
    code = """
import torch
import torch.library
for name in ("register_fake", "custom_op", "register_vmap", "opcheck"):
    if hasattr(torch.library, name):
        delattr(torch.library, name)
import flashback_attention as fa
from flashback_attention import _torch
assert _torch.forward_op is None
torch.manual_seed(0)
x = [torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
call = lambda *x: fa.attention(*x, causal=True)
print(torch.autograd.gradcheck(call, x), torch.autograd.gradgradcheck(call, x))
"""
    assert python(code).split() == ["True", "True"]


def documented():
    for name in fa.__all__:
        yield name, getattr(fa, name)


def test_docstrings():
    """Everything public says what it is; attention's docstring has every argument."""
    for name, thing in documented():
        assert thing.__doc__ and thing.__doc__[0] not in " \n", name
    for function in (fa.attention, fa.attention_vjp):
        for argument in inspect.signature(function).parameters:
            assert re.search(rf"^    (\w+, )*{argument}(, \w+)*:", inspect.getdoc(function), flags=re.M), argument


def test_types():
    """Every argument and result of what is public is annotated, and the package says so."""
    assert (PACKAGE / "py.typed").exists()
    for name, thing in documented():
        if inspect.isfunction(thing):
            hints = typing.get_type_hints(inspect.unwrap(thing))
            assert set(inspect.signature(thing).parameters) | {"return"} <= set(hints), name


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.name)
def test_sources(path):
    """Modules say what they are, fit the oldest Python that is supported, and keep to 120 columns."""
    tree = ast.parse(path.read_text(), feature_version=(3, 9))
    assert ast.get_docstring(tree), path
    assert [n for n, line in enumerate(path.read_text().splitlines(), 1) if len(line) > 120] == []


@pytest.mark.wheel
def test_wheel(tmp_path):
    """`pip install .` in an environment of its own; the wheel is small, for every Python, and holds what it should."""
    if importlib.util.find_spec("ensurepip") is None:
        pytest.skip("this test needs Python's venv with pip (Debian's package python3-venv)")
    run = lambda *command: subprocess.run([str(x) for x in command], check=True, capture_output=True, text=True).stdout
    environment = tmp_path / "venv"
    run(sys.executable, "-m", "venv", environment)
    try:
        run(environment / "bin/pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, conftest.ROOT)
    except subprocess.CalledProcessError as error:
        if "scikit-build-core" not in error.stderr:
            raise
        pytest.skip("this test needs scikit-build-core, which pip cannot get here")
    (wheel,) = tmp_path.glob("*.whl")
    assert re.fullmatch(rf"flashback_attention-{fa.__version__}-py3-none-(linux|macosx)\w+\.whl", wheel.name)
    assert wheel.stat().st_size < 5e6
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    library = [n for n in names if "/libflashback." in n]
    assert names == {f"flashback_attention/{p.name}" for p in [*MODULES, PACKAGE / "py.typed"]} | set(library)
    assert len(library) == 1
    run(environment / "bin/pip", "install", "--no-deps", wheel)
    clean = {n: x for n, x in os.environ.items() if n not in ("FLASHBACK_LIB", "PYTHONPATH")}
    said = subprocess.run([environment / "bin/python", "-m", "flashback_attention"], cwd=tmp_path, env=clean,
                          capture_output=True, text=True)  # fmt: skip
    assert said.stdout.startswith(f"version: {fa.__version__}\n"), said.stderr
