"""Plans: from operands and options to a descriptor, to a plan of the library; and the cache that keeps plans.

A `View` says how an operand lies, whatever framework it comes from; `Options` holds the numbers. Every rule on them is
the library's, except what a descriptor cannot express: which kind of tensor stands where. A plan is made on the first
call with a combination of shapes, strides, types and options, and found again by it. Next: _engine.py.
"""

import collections
import ctypes as c
import math
import os
import threading
import typing

from ._abi import UNBOUNDED, Desc, Device, DLDataType, DLDevice, DLTensor, Flag, Layout, Route, Shape, Strides, Window
from ._library import check, lib, text

BHLD = "[batch, heads, length, head_dim]"
DTYPES = {(2, 32): "f32", (2, 16): "f16", (4, 16): "bf16", (2, 64): "f64", (6, 8): "bool", (0, 32): "i32"}
CODES = {word: code for code, word in DTYPES.items()}
OPERANDS = ("q", "k", "v", "bias", "mask", "block_mask", "sinks", "cu_q", "cu_k", "lens_q", "lens_k")
PUBLIC = (*OPERANDS[:7], "cu_seqlens_q", "cu_seqlens_k", *OPERANDS[9:])  # what `attention` calls them
GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks")


class View(typing.NamedTuple):
    """Where an operand lies and how: strides in elements, type and device as DLPack counts them."""

    data: int
    shape: tuple
    strides: tuple
    type: tuple  # (code, bits)
    device: tuple  # (device_type, device_id)
    owner: object = None  # keeps the memory

    @property
    def word(self):
        return DTYPES.get(self.type, f"of DLPack type {self.type}")


class Options(typing.NamedTuple):
    """The numbers of a problem. Windows of -1 are unbounded; scale None is 1/sqrt(head_dim)."""

    left: int = -1
    right: int = -1
    top_left: bool = False
    position_offset: int = 0
    scale: typing.Optional[float] = None
    softcap: float = 0.0
    block_q: int = 0
    block_k: int = 0
    len_q: int = 0  # the longest sequence of a packed batch; otherwise 0
    len_k: int = 0
    deterministic: bool = False
    route: str = "auto"
    threads: int = 0


class Place(typing.NamedTuple):
    """Shape, strides in elements and type of a tensor that a call makes. `fill` is what it holds before, None where all
    of it is written: of packed batches the library leaves rows behind the last boundary alone."""

    shape: tuple
    strides: tuple
    type: tuple
    fill: typing.Optional[float] = None


def contiguous(shape):
    """Strides of a tensor that is contiguous in the order of its shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def dense(shape, order):
    """Strides of a dense tensor in the order of dimensions that the strides `order` have: heads outside of rows,
    [B,H,L,D], or rows outside of heads, [B,L,H,D] in memory. Packed [total,H,D] is contiguous."""
    if len(shape) == 4 and order[1] < order[2]:
        batch, heads, rows, cols = shape
        b, l, h, d = contiguous((batch, rows, heads, cols))
        return b, h, l, d
    return contiguous(shape)


# ---- From views to a descriptor ----


def _dltensor(view):
    """A DLTensor of a view; what it points to lives as long as it does."""
    n = len(view.shape)
    shape, strides = (c.c_int64 * n)(*view.shape), (c.c_int64 * n)(*view.strides)
    kind, device = DLDataType(*view.type, 1), DLDevice(*view.device)
    tensor = DLTensor(view.data, device, n, kind, shape, strides, 0)
    tensor.alive = (shape, strides)
    return tensor


def _strides(view, name):
    found = Strides()
    check(lib.fb_strides_from_dlpack(found, Layout.BHLD, _dltensor(view), name.encode()))
    return found


def _as4(view):
    """A packed [total,H,D] view as [1,H,total,D]."""
    (total, heads, cols), (row, head, col) = view.shape, view.strides
    return view._replace(shape=(1, heads, total, cols), strides=(0, head, row, col))


def _expect(view, name, word, rank, use):
    """What a descriptor cannot express: type, rank and contiguity of the flat operands."""
    if view.word != word:
        raise TypeError(f"{name} is {view.word}, expected {word}; {use}")
    if len(view.shape) != rank:
        raise ValueError(f"{name} has shape {list(view.shape)}, expected {rank} dimension{'s'[: rank > 1]}; {use}")


def _expect_flat(view, name, shape):
    if view.shape != shape:
        raise ValueError(f"{name} has shape {list(view.shape)}, expected {list(shape)}")
    if view.strides != contiguous(shape) and math.prod(shape) > 1:
        raise ValueError(f"{name} has strides {list(view.strides)}, expected a contiguous tensor; copy it")


def check_ranks(views, packed):
    """q, k and v have 4 dimensions, or 3 if packed. `views` is anything with shapes."""
    rank, names = (3, "[total, heads, head_dim], as cu_seqlens are given") if packed else (4, BHLD)
    for name in ("q", "k", "v"):
        if len(views[name].shape) != rank:
            raise ValueError(
                f"{name} has shape {list(views[name].shape)}, expected {rank} dimensions: {names}"
                + ("" if packed else ', or [batch, length, heads, head_dim] with layout="blhd"')
            )


def _check_devices(views):
    for name, view in views.items():
        if view is not None and view.device != views["q"].device:
            raise ValueError(
                f"{name} lies on DLPack device {view.device} and q on {views['q'].device}; all must be on one device"
            )


def _set_packed(desc, views, options):
    cu_q, cu_k = views["cu_q"], views["cu_k"]
    for name, view in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if view is None:
            raise ValueError(f"{name} is None, but the other one is given; a packed batch needs both")
        _expect(view, name, "i32", 1, "it holds the start of every sequence and the end of the last one")
        _expect_flat(view, name, cu_q.shape)
    if cu_q.shape == (0,):
        raise ValueError("cu_seqlens_q is empty, expected batch + 1 numbers that start with 0")
    desc.flags |= Flag.PACKED
    desc.batch = cu_q.shape[0] - 1
    desc.total_q, desc.total_k = desc.len_q, desc.len_k
    desc.len_q, desc.len_k = options.len_q, options.len_k


def _set_lengths(desc, views):
    for name in ("lens_q", "lens_k"):
        if views[name] is not None:
            _expect(views[name], name, "i32", 1, "it says how many rows of each batch entry count")
            _expect_flat(views[name], name, (desc.batch,))
            desc.flags |= Flag.LENGTHS


def _set_bias(desc, view, dtype):
    _expect(view, "bias", dtype, 4, "it is added to the scores; its type is q's and its shape [B|1, Hq|1, Lq|1, Lk|1]")
    desc.flags |= Flag.BIAS
    desc.bias_shape, desc.bias = Shape(*view.shape), _strides(view, "bias")


def _set_mask(desc, view):
    use = "True keeps a cell, and its shape is [B|1, Hq|1, Lq|1, Lk|1]; numbers that are added to the scores are a bias"
    _expect(view, "mask", "bool", 4, use)
    desc.flags |= Flag.MASK
    desc.mask_shape, desc.mask = Shape(*view.shape), _strides(view, "mask")


def _set_block_mask(desc, view, options):
    use = "True keeps a block of block_q x block_k cells, and its shape is [B|1, Hq|1, blocks of Lq, blocks of Lk]"
    _expect(view, "block_mask", "bool", 4, use)
    desc.flags |= Flag.BLOCK_MASK
    desc.block_q, desc.block_k = options.block_q, options.block_k
    desc.block_batch, desc.block_heads = view.shape[:2]
    if options.block_q > 0 and options.block_k > 0:
        blocks = (-(-desc.len_q // options.block_q), -(-desc.len_k // options.block_k))
        _expect_flat(view, "block_mask", view.shape[:2] + blocks)


def _set_numbers(desc, options):
    desc.window = Window(*(UNBOUNDED if x == -1 else x for x in (options.left, options.right)))
    desc.position_offset, desc.softcap = options.position_offset, options.softcap
    desc.scale = math.nan if options.scale is None else options.scale
    desc.threads = options.threads
    desc.route = Route[options.route.upper()]
    if options.top_left:
        desc.flags |= Flag.TOP_LEFT
    if options.deterministic:
        desc.flags |= Flag.DETERMINISTIC


def describe(views, options):
    """The descriptor of a forward pass. `views` has a View or None for each of OPERANDS."""
    packed = views["cu_q"] is not None or views["cu_k"] is not None
    check_ranks(views, packed)
    _check_devices(views)
    desc = Desc()
    lib.fb_desc_init(desc, c.sizeof(desc))
    q, k, v = (_as4(views[n]) if packed else views[n] for n in ("q", "k", "v"))
    check(lib.fb_desc_from_dlpack(desc, Layout.BHLD, _dltensor(q), _dltensor(k), _dltensor(v)))
    if packed:
        _set_packed(desc, views, options)
    _set_lengths(desc, views)
    if views["bias"] is not None:
        _set_bias(desc, views["bias"], views["q"].word)
    if views["mask"] is not None:
        _set_mask(desc, views["mask"])
    if views["block_mask"] is not None:
        _set_block_mask(desc, views["block_mask"], options)
    if views["sinks"] is not None:
        use = "it holds one logit for each query head"
        _expect(views["sinks"], "sinks", "f64" if views["q"].word == "f64" else "f32", 1, use)
        _expect_flat(views["sinks"], "sinks", (desc.heads_q,))
        desc.flags |= Flag.SINKS
    _set_numbers(desc, options)
    out, _ = results(views)
    desc.out = _strides(_placed(out, views["q"], packed), "out")
    return desc


def _placed(place, like, packed=False):
    view = View(0, place.shape, place.strides, place.type, like.device)
    return _as4(view) if packed else view


def results(views):
    """Places of out and lse: out is dense in the order of q's dimensions, lse contiguous in f32, or f64 for f64."""
    q, v = views["q"], views["v"]
    shape, order = q.shape[:-1] + v.shape[-1:], q.strides
    packed = len(q.shape) == 3
    rows = q.shape[1::-1] if packed else q.shape[:-1]
    return (
        Place(shape, dense(shape, order), q.type, 0.0 if packed else None),
        Place(rows, contiguous(rows), CODES["f64" if q.word == "f64" else "f32"], -math.inf if packed else None),
    )


def gradients(views, wanted):
    """Places of the wanted gradients, None for the others: each is dense in the order of its tensor's dimensions."""
    places = []
    for name, w in zip(("q", "k", "v", "bias", "sinks"), wanted):
        view = views[name]
        fill = 0.0 if w and len(view.shape) == 3 else None
        places.append(Place(view.shape, dense(view.shape, view.strides), view.type, fill) if w else None)
    return places


def describe_backward(views, options, dout, dlse, wanted):
    """The descriptor of a backward pass. `dout` is the View of the cotangent of out, None if it lies as out does,
    `dlse` says whether lse has one, `wanted` which of GRADIENTS are asked for."""
    desc = describe(views, options)
    packed = bool(desc.flags & Flag.PACKED)
    out, _ = results(views)
    dout = dout or View(0, out.shape, out.strides, out.type, views["q"].device)
    if dout.shape != out.shape or dout.type != out.type:
        raise ValueError(
            f"dout is {dout.word} {list(dout.shape)}, expected {views['q'].word} {list(out.shape)}, as out is"
        )
    _check_devices({"q": views["q"], "dout": dout})
    desc.dout = _strides(_as4(dout) if packed else dout, "dout")
    if dlse:
        desc.flags |= Flag.DLSE
    places = gradients(views, wanted)
    for name, flag, place in zip("dq dk dv".split(), (Flag.NO_DQ, Flag.NO_DK, Flag.NO_DV), places):
        if place is None:
            desc.flags |= flag
        else:
            setattr(desc, name, _strides(_placed(place, views["q"], packed), name))
    if places[3]:
        desc.flags |= Flag.DBIAS
        desc.dbias = _strides(_placed(places[3], views["q"]), "dbias")
    if places[4]:
        desc.flags |= Flag.DSINKS
    return desc


# ---- Plans ----


class Plan:
    """A plan of the library and what a call with it makes: `places`, and `workspace` in bytes. It ends with its last
    reference, so a call that runs keeps it."""

    __slots__ = ("handle", "places", "workspace")

    def __init__(self, desc, places):
        self.handle = c.c_void_p()
        check(lib.fb_plan_create(self.handle, desc))
        self.places, self.workspace = places, lib.fb_plan_workspace(self.handle)

    def __del__(self, destroy=lib.fb_plan_destroy):
        if getattr(self, "handle", None):
            destroy(self.handle)

    def explain(self):
        return text(lib.fb_plan_explain, self.handle)


class Cache:
    """The plans used last, by whatever tells them apart. Any number of threads may use it."""

    def __init__(self, capacity):
        self.capacity, self.plans, self.lock = capacity, collections.OrderedDict(), threading.Lock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self):
        """In the child nobody holds the lock that a thread of the parent may have held."""
        self.lock = threading.Lock()

    def find(self, key, make):
        """The plan of a key; `make` gives it the first time, outside of the lock, as that may compile for seconds."""
        with self.lock:
            plan = self.plans.get(key)
            if plan is not None:
                self.plans.move_to_end(key)
                return plan
        plan = make()
        with self.lock:
            self.plans[key] = plan
            while len(self.plans) > self.capacity:
                self.plans.popitem(last=False)
        return plan

    def clear(self):
        with self.lock:
            self.plans.clear()

    def __len__(self):
        return len(self.plans)


cache = Cache(capacity=512)


def device_word(view):
    """The word "cpu" or "cuda", or None for devices that the library does not know."""
    return {1: Device.CPU.name.lower(), 2: Device.CUDA.name.lower()}.get(view.device[0])
