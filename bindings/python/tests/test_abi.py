"""The ctypes side of the C interface: tests/house/abi.txt, which the house tests hold to the header, lists every
struct, field and constant; here each is found in _abi.py, at its place and with its size."""

import ctypes as c
import re

import conftest
import pytest
from flashback_attention import _abi, _library

ROWS = [line.split("#")[0].split() for line in (conftest.ROOT / "tests/house/abi.txt").read_text().splitlines()]
ROWS = [row for row in ROWS if row]
STRUCTS = {
    "fb_window": _abi.Window, "fb_strides": _abi.Strides, "fb_shape": _abi.Shape, "fb_desc": _abi.Desc,
    "fb_ref": _abi.Ref, "fb_io": _abi.Io, "fb_dltensor": _abi.DLTensor,
}  # fmt: skip
ENUMS = (_abi.Status, _abi.Dtype, _abi.Device, _abi.Route, _abi.Layout, _abi.Flag)


def test_structs():
    table = {row[0]: int(row[1]) for row in ROWS if len(row) == 2 and row[0].startswith("fb_")}
    assert {name: c.sizeof(struct) for name, struct in STRUCTS.items()} == table


def test_fields():
    table = [(row[0], int(row[1]), int(row[2])) for row in ROWS if len(row) == 3]
    found = [
        (f"{name}.{field}", getattr(struct, field).offset, getattr(struct, field).size)
        for name, struct in STRUCTS.items()
        for field, _ in struct._fields_
    ]
    assert sorted(found) == sorted(table)


def test_constants():
    table = {row[0][3:]: int(row[1]) for row in ROWS if row[0].startswith("FB_")}
    found = {member.name: int(member) for enum in ENUMS for member in enum}
    found.update(UNBOUNDED=_abi.UNBOUNDED, BROADCAST=_abi.BROADCAST)
    assert found == table


def test_sizes_that_the_library_writes():
    desc, io = _abi.Desc(), _abi.Io()
    _library.lib.fb_desc_init(desc, c.sizeof(desc))
    _library.lib.fb_io_init(io, c.sizeof(io))
    assert (desc.size, io.size) == (c.sizeof(_abi.Desc), c.sizeof(_abi.Io))
    assert desc.window.left == _abi.UNBOUNDED and desc.scale != desc.scale


def test_every_function_is_declared():
    """Functions that Python calls have as many types as the header gives them arguments."""
    header = "".join(p.read_text() for p in sorted((conftest.ROOT / "include").glob("*.h")))
    header = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
    written = dict(re.findall(r"FB_API[^;(]*?\b(fb_\w+)\(([^)]*)\)", header))
    for name, (_, arguments) in _abi.FUNCTIONS.items():
        assert len(arguments) == (0 if written[name] == "void" else written[name].count(",") + 1), name


@pytest.mark.parametrize("status, error", [(1, ValueError), (2, _library.Unsupported), (3, _library.NoDevice),
                                           (4, RuntimeError), (6, MemoryError), (99, RuntimeError)])  # fmt: skip
def test_statuses(status, error):
    with pytest.raises(error):
        _library.check(status)
