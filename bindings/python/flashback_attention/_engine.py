"""One call, whatever the framework: find the plan, make the outputs, fill fb_io, run.

A framework is a `kind`: an object with `signature`, `view`, `pointer`, `empty`, `workspace` and `stream`, see
_arrays.py and _torch.py. Operands are tuples in the order of _plan.OPERANDS, with None for what is not used.
"""

import ctypes as c
import threading

from . import _plan
from ._abi import Device, Flag, Io, Ref
from ._library import check, lib

# fb_io as 64-bit words: filling an array of integers takes a third of the time of filling the struct.
_Words = c.c_uint64 * (c.sizeof(Io) // 8)
for _verb in (lib.fb_forward, lib.fb_backward):
    _verb.argtypes = [c.c_void_p, c.POINTER(c.c_uint64)]
_SLOT = {name: getattr(Io, name).offset // 8 for name, _ in Io._fields_ if name != "reserved"}
_OPERANDS = tuple(_SLOT[name] for name in _plan.OPERANDS)
_GRADIENTS = tuple(_SLOT[name] for name in _plan.GRADIENTS)


def _views(kind, operands):
    names = zip(_plan.OPERANDS, _plan.PUBLIC, operands)
    return {name: None if t is None else kind.view(t, public) for name, public, t in names}


def _signatures(kind, operands):
    signature = kind.signature
    return [t if t is None else signature(t) for t in operands]


def _io(kind, plan, operands):
    """fb_io with operands, workspace and stream; and what has to live during the call."""
    words = _Words(c.sizeof(Io))
    pointer = kind.pointer
    for slot, tensor in zip(_OPERANDS, operands):
        if tensor is not None:
            words[slot] = pointer(tensor)
    keep, words[_SLOT["workspace"]] = kind.workspace(plan.workspace, operands[0])
    words[_SLOT["workspace_size"]] = plan.workspace
    words[_SLOT["stream"]] = kind.stream(operands[0])
    return words, keep


def forward(kind, operands, options):
    """out and lse of new memory."""

    def make():
        views = _views(kind, operands)
        desc = _plan.describe(views, options)
        desc.flags |= Flag.FORWARD_ONLY
        return _plan.Plan(desc, _plan.results(views))

    plan = _plan.cache.find((kind, options, *_signatures(kind, operands)), make)
    out, lse = [kind.empty(place, operands[0]) for place in plan.places]
    words, keep = _io(kind, plan, operands)
    words[_SLOT["out"]], words[_SLOT["lse"]] = kind.pointer(out), kind.pointer(lse)
    check(lib.fb_forward(plan.handle, words))
    return out, lse


def backward(kind, dout, dlse, operands, out, lse, options, wanted):
    """The wanted ones of dq, dk, dv, dbias, dsinks as a list of five, None for the others. `out` and `lse` lie as
    `forward` makes them."""

    def make():
        views = _views(kind, operands)
        desc = _plan.describe_backward(views, options, kind.view(dout, "dout"), dlse is not None, wanted)
        _check_saved(views, kind, out, lse, dlse)
        return _plan.Plan(desc, _plan.gradients(views, wanted))

    saved = _signatures(kind, (dout, dlse, out, lse))
    plan = _plan.cache.find((kind, options, wanted, *saved, *_signatures(kind, operands)), make)
    results = [None if place is None else kind.empty(place, operands[0]) for place in plan.places]
    words, keep = _io(kind, plan, operands)
    for name, tensor in (("out", out), ("lse", lse), ("dout", dout), ("dlse", dlse)):
        if tensor is not None:
            words[_SLOT[name]] = kind.pointer(tensor)
    for slot, tensor in zip(_GRADIENTS, results):
        if tensor is not None:
            words[slot] = kind.pointer(tensor)
    check(lib.fb_backward(plan.handle, words))
    return results


def _check_saved(views, kind, out, lse, dlse):
    """out, lse and dlse lie where the descriptor says they do."""
    places = _plan.results(views)
    for name, tensor, place in (("out", out, places[0]), ("lse", lse, places[1]), ("dlse", dlse, places[1])):
        if tensor is None:
            continue
        view = kind.view(tensor, name)
        used = [n for n, size in enumerate(place.shape) if size > 1]
        if view.shape != place.shape or view.type != place.type or view.device != views["q"].device:
            raise ValueError(
                f"{name} is {view.word} {list(view.shape)} on DLPack device {view.device}, expected "
                f"{_plan.DTYPES[place.type]} {list(place.shape)} on {views['q'].device}, as the forward gives it"
            )
        if 0 not in place.shape and any(view.strides[n] != place.strides[n] for n in used):
            raise ValueError(
                f"{name} has strides {list(view.strides)}, expected {list(place.strides)}, as the forward gives "
                "it; copy it"
            )


def explain(kind, operands, options):
    """What a plan for both passes does, in words."""
    views = _views(kind, operands)
    wanted = tuple(views[name] is not None for name in ("q", "k", "v", "bias", "sinks"))
    return _plan.Plan(_plan.describe_backward(views, options, None, False, wanted), ()).explain()


def supported(kind, operands, options):
    """(True, "") or (False, reason)."""
    try:
        views = _views(kind, operands)
        check(lib.fb_supported(_plan.describe(views, options)))
    except (ValueError, TypeError, RuntimeError, MemoryError) as error:
        return False, str(error)
    return True, ""


class _Scratch(threading.local):
    """This thread's workspace on the CPU: kept from call to call up to a size, as fresh memory costs page faults."""

    KEPT = 256 << 20
    memory = None

    def get(self, size):
        if self.memory is None or self.memory.size < size:
            memory = Memory(size)
            if size > self.KEPT:
                return memory
            self.memory = memory
        return self.memory


class Memory:
    """`size` bytes of the CPU, 64-byte aligned, freed with the last reference."""

    __slots__ = ("ref", "size")

    def __init__(self, size):
        self.ref, self.size = Ref(), 0
        check(lib.fb_alloc(self.ref, Device.CPU, 0, size))
        self.size = size

    def __del__(self, free=lib.fb_free):
        if self.ref.data:
            free(self.ref, 0, 0)


_scratch = _Scratch()


def cpu_workspace(size):
    """(what keeps it, its address): valid until this thread's next call."""
    if not size:
        return None, 0
    memory = _scratch.get(size)
    return memory, memory.ref.data
