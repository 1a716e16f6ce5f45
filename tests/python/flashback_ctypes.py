"""One function that runs a Problem forward and backward in float64, over the structs of the Python package. For the tests
and bench/peers; Python alone is enough. FLASHBACK_LIB names the shared library."""

import ctypes as c
import math
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bindings/python/flashback_attention"))
import _abi  # noqa: E402
from _abi import UNBOUNDED, Desc, Io, Ref, Shape, Strides, Window  # noqa: E402, F401

CPU = _abi.Device.CPU
F32, F16, BF16, F64 = _abi.Dtype
ROUTES = {route.name.lower(): int(route) for route in _abi.Route}
FLAGS = {flag.name: int(flag) for flag in _abi.Flag}


def load():
    return _abi.declare(c.CDLL(os.environ["FLASHBACK_LIB"]))


def check(lib, status):
    if status != 0:
        raise RuntimeError(f"status {status}: {lib.fb_last_error().decode()}")


class Tensor:
    """A logical [batch, heads, rows, width] of doubles at given strides. What no element uses is poisoned, and
    `read` checks that it stayed so."""

    POISON = b"\xff" * 8

    def __init__(self, dims, strides):
        batch, heads, rows, self.width = dims
        self.starts = [
            b * strides.batch + h * strides.head + i * strides.row
            for b in range(batch)
            for h in range(heads)
            for i in range(rows)
        ]
        self.size = max(self.starts, default=0) + self.width
        self.buffer = (c.c_double * self.size)()
        c.memset(self.buffer, 0xFF, 8 * self.size)

    def write(self, rows):
        for start, row in zip(self.starts, rows):
            self.buffer[start : start + self.width] = row
        return self

    def read(self):
        used = set()
        for start in self.starts:
            used.update(range(start, start + self.width))
        raw = bytes(self.buffer)
        for at in range(self.size):
            if at not in used and raw[8 * at : 8 * at + 8] != self.POISON:
                raise AssertionError(f"element {at} is in a gap and was written")
        return [self.buffer[start : start + self.width] for start in self.starts]


def order(p, heads, side):
    """Logical rows are numbered as the oracle's flat lists: [B,H,L], or [total,H] when packed. Gives dims in the order
    that Tensor walks, and for each of its rows the oracle's."""
    if not p.packed:
        length = p.len_q if side == "q" else p.len_k
        return (p.batch, heads, length), list(range(p.batch * heads * length))
    total = (p.cu_q if side == "q" else p.cu_k)[-1]
    return (1, heads, total), [i * heads + h for h in range(heads) for i in range(total)]


def strides_of(layout, dims, width):
    """`layout` is (order, pad): which of batch, head and row is outermost ... innermost, and unused elements after
    every row."""
    names, pad = layout
    sizes = dict(zip(("batch", "head", "row"), dims))
    strides, step = Strides(), width + pad
    for name in reversed(names):
        setattr(strides, name, step)
        step *= max(sizes[name], 1)
    return strides


SIDES = {  # tensor: side of its rows, does it have D or Dv columns
    "q": ("q", "head_dim"), "k": ("k", "head_dim"), "v": ("k", "head_dim_v"),
    "out": ("q", "head_dim_v"), "dout": ("q", "head_dim_v"),
    "dq": ("q", "head_dim"), "dk": ("k", "head_dim"), "dv": ("k", "head_dim_v"),
}  # fmt: skip


def describe(lib, p, route, layouts, flags):
    d = Desc()
    lib.fb_desc_init(d, c.sizeof(d))
    d.dtype, d.route = F64, ROUTES[route]
    for name in "batch heads_q heads_kv len_q len_k head_dim head_dim_v position_offset softcap".split():
        setattr(d, name, getattr(p, name))
    if p.packed:
        d.total_q, d.total_k = p.cu_q[-1], p.cu_k[-1]
    d.window = Window(
        UNBOUNDED if p.left is None else p.left,
        UNBOUNDED if p.right is None else p.right,
    )
    d.scale = math.nan if p.scale is None else p.scale
    if p.bias:
        d.bias_shape = Shape(*p.bias)
    if p.mask:
        d.mask_shape = Shape(*p.mask)
    if p.block:
        d.block_q, d.block_k, d.block_batch, d.block_heads = p.block
    options = {
        "TOP_LEFT": p.top_left, "PACKED": p.packed, "LENGTHS": p.lens_q or p.lens_k, "BIAS": p.bias,
        "DBIAS": p.bias, "MASK": p.mask, "BLOCK_MASK": p.block, "SINKS": p.sinks, "DSINKS": p.sinks, "DLSE": p.dlse,
    }  # fmt: skip
    for name in [name for name, used in options.items() if used] + list(flags):
        d.flags |= FLAGS[name]
    tensors = {}
    for name, (side, width) in SIDES.items():
        width = getattr(p, width)
        dims, rows = order(p, p.heads_q if side == "q" else p.heads_kv, side)
        strides = strides_of(layouts.get(name, (("batch", "head", "row"), 0)), dims, width)
        if 0 not in (*dims, width):
            setattr(d, name, strides)
        tensors[name] = (Tensor((*dims, width), strides), rows)
    return d, tensors


def attention(lib, p, route, layouts=None, flags=(), old=None):
    """Runs p on a route; gives what oracle_f64.attention gives. `old` are gradients to accumulate onto. Gradients that
    `flags` leave out are missing from the result."""
    d, tensors = describe(lib, p, route, layouts or {}, flags)
    io, keep, flat = Io(), [], {}
    lib.fb_io_init(io, c.sizeof(io))

    def give(name, buffer):
        keep.append(buffer)
        setattr(io, name, Ref(c.cast(buffer, c.c_void_p), 0))
        return buffer

    def doubles(values):
        return (c.c_double * max(len(values), 1))(*values)

    def tensor(name, values=None):
        t, rows = tensors[name]
        if values is not None:
            t.write([values[r * t.width : (r + 1) * t.width] for r in rows])
        give(name, t.buffer if t.size else (c.c_double * 1)())

    def result(name):
        t, rows = tensors[name]
        found = [0.0] * (len(rows) * t.width)
        for r, row in zip(rows, t.read()):
            found[r * t.width : (r + 1) * t.width] = row
        return found

    plan = c.c_void_p()
    check(lib, lib.fb_plan_create(plan, d))
    try:
        for name in ("q", "k", "v"):
            tensor(name, p.tensors[name])
        for name in ("bias", "sinks"):
            if name in p.tensors:
                give(name, doubles(p.tensors[name]))
        for name in ("mask", "block_mask"):
            if name in p.tensors:
                give(name, (c.c_uint8 * max(len(p.tensors[name]), 1))(*p.tensors[name]))
        for name in ("lens_q", "lens_k", "cu_q", "cu_k"):
            if getattr(p, name) is not None:
                give(name, (c.c_int32 * max(len(getattr(p, name)), 1))(*getattr(p, name)))
        io.workspace_size = lib.fb_plan_workspace(plan)
        c.memset(give("workspace", (c.c_uint8 * max(io.workspace_size, 1))()), 0xFF, io.workspace_size)
        tensor("out")
        flat["lse"] = give("lse", doubles([math.nan] * (p.rows_q * p.heads_q)))
        check(lib, lib.fb_forward(plan, io))

        left_out = [name.lower()[3:] for name in flags if name.startswith("NO_")]
        wanted = [name for name in ("dq", "dk", "dv") if name not in left_out]
        tensor("dout", p.tensors["dout"])
        if p.dlse:
            give("dlse", doubles(p.tensors["dlse"]))
        for name in wanted:
            tensor(name, old and old[name])
        for name, like in (("dbias", "bias"), ("dsinks", "sinks")):
            if like in p.tensors:
                flat[name] = give(name, doubles(old[name] if old else [math.nan] * len(p.tensors[like])))
        c.memset(io.workspace.data, 0xFF, io.workspace_size)
        check(lib, lib.fb_backward(plan, io))
        found = {name: result(name) for name in ["out"] + wanted}
        sizes = {"lse": p.rows_q * p.heads_q, "dbias": len(p.tensors.get("bias", ())), "dsinks": p.heads_q}
        found.update({name: list(buffer)[: sizes[name]] for name, buffer in flat.items()})
        return found
    finally:
        lib.fb_plan_destroy(plan)
