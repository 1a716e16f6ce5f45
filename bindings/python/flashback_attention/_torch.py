"""PyTorch: two functional operations, flashback::forward and flashback::backward, with shapes for tracing, gradients
through out and lse, and second derivatives by _dense.py.

Operands and numbers go to the operations flat, in the order of _SCHEMA. PyTorch before 2.4 has no such operations;
there the same autograd functions call the library themselves. Next: _engine.py.
"""

import torch

from . import _engine, _plan
from ._plan import CODES, Options, View, contiguous, dense

_TYPES = {
    torch.float32: CODES["f32"], torch.float16: CODES["f16"], torch.bfloat16: CODES["bf16"],
    torch.float64: CODES["f64"], torch.bool: CODES["bool"], torch.int32: CODES["i32"],
}  # fmt: skip
_DTYPES = {code: dtype for dtype, code in _TYPES.items()}
_DEVICES = {"cpu": 1, "cuda": 2}
COUNT = len(_plan.OPERANDS)

_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, Tensor? block_mask, Tensor? sinks, Tensor? cu_q, "
    "Tensor? cu_k, Tensor? lens_q, Tensor? lens_k, SymInt left, SymInt right, bool top_left, SymInt position_offset, "
    "float? scale, float softcap, SymInt block_q, SymInt block_k, SymInt len_q, SymInt len_k, bool deterministic, "
    "str route"
)


class Tensors:
    """The kind of _engine.py for PyTorch's tensors, on the current stream of their device."""

    @staticmethod
    def signature(tensor):
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.device

    @staticmethod
    def view(tensor, name):
        kind, device = _TYPES.get(tensor.dtype), _DEVICES.get(tensor.device.type)
        if kind is None:
            raise TypeError(f"{name} is {tensor.dtype}, expected one of: {', '.join(map(str, _TYPES))}")
        if device is None:
            raise ValueError(f"{name} lies on {tensor.device}, expected cpu or cuda; move it there with .to()")
        where = (device, tensor.device.index or 0)
        return View(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), kind, where, tensor)

    @staticmethod
    def pointer(tensor):
        return tensor.data_ptr()

    @staticmethod
    def empty(place, like):
        found = torch.empty_strided(place.shape, place.strides, dtype=_DTYPES[place.type], device=like.device)
        return found if place.fill is None else found.fill_(place.fill)

    @staticmethod
    def workspace(size, like):
        if like.device.type == "cpu":
            return _engine.cpu_workspace(size)
        memory = torch.empty(size, dtype=torch.uint8, device=like.device)
        return memory, memory.data_ptr()

    @staticmethod
    def stream(like):
        return 0 if like.device.type == "cpu" else torch.cuda.current_stream(like.device).cuda_stream


tensors = Tensors()


# ---- The operations ----


def _options(numbers, like):
    """On the CPU torch.set_num_threads holds, as far as bits cannot tell."""
    return Options(*numbers, torch.get_num_threads() if like.device.type == "cpu" else 0)


def _forward(*arguments):
    operands = arguments[:COUNT]
    return _engine.forward(tensors, operands, _options(arguments[COUNT:], operands[0]))


def _backward(dout, dlse, *arguments):
    operands, numbers, (out, lse, wanted) = arguments[:COUNT], arguments[COUNT:-3], arguments[-3:]
    if dout.stride(-1) != 1:
        dout = dout.contiguous()  # an expanded cotangent, as that of a sum
    dlse = None if dlse is None else dlse.contiguous()
    options = _options(numbers, operands[0])
    found = _engine.backward(tensors, dout, dlse, operands, out, lse, options, tuple(wanted))
    return tuple(operands[0].new_empty(0) if x is None else x for x in found)


def _forward_fake(*arguments):
    q, k, v = arguments[:3]
    packed = arguments[7] is not None
    _plan.check_ranks({"q": q, "k": k, "v": v}, packed)
    if not q.device == k.device == v.device:
        raise ValueError(f"q lies on {q.device}, k on {k.device} and v on {v.device}; all must be on one device")
    shape = (*q.shape[:-1], v.shape[-1])
    rows = (q.shape[1], q.shape[0]) if packed else q.shape[:-1]
    stat = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty_strided(shape, dense(shape, q.stride())), q.new_empty_strided(rows, contiguous(rows), dtype=stat)


def _backward_fake(dout, dlse, *arguments):
    of = [arguments[n] for n in DIFFERENTIABLE]
    return tuple(
        x.new_empty_strided(x.shape, dense(x.shape, x.stride())) if w else arguments[0].new_empty(0)
        for x, w in zip(of, arguments[-1])
    )


# ---- Gradients ----


DIFFERENTIABLE = (0, 1, 2, 3, 6)  # q, k, v, bias and sinks among the operands


def in_place_of(gradients, wanted, count):
    """The gradients of DIFFERENTIABLE among None for all other arguments."""
    found = [None] * count
    for n, gradient, w in zip(DIFFERENTIABLE, gradients, wanted):
        found[n] = gradient if w else None
    return found


def _needs(tensors):
    return torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in tensors])


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, numbers, *operands):
        out, lse = _run(forward_op, _forward, operands, (*operands, *numbers))
        ctx.save_for_backward(*operands, out, lse)
        ctx.numbers = numbers
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        *operands, out, lse = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * (COUNT + 1)
        dout = torch.zeros_like(out) if dout is None else dout
        wanted = [ctx.needs_input_grad[1 + n] for n in DIFFERENTIABLE]
        found = _backward_autograd(dout, dlse, *operands, *ctx.numbers, out, lse, wanted)
        return (None, *in_place_of(found, wanted, COUNT))


class _Backward(torch.autograd.Function):
    """The backward pass as a function of dout, dlse, q, k, v, bias and sinks. out and lse follow from them, so they get
    no gradient of their own."""

    @staticmethod
    def forward(ctx, rest, dout, dlse, *operands):
        ctx.save_for_backward(dout, dlse, *operands)
        ctx.rest = rest
        ctx.set_materialize_grads(False)
        tensors = (dout, dlse, *operands)
        return _run(backward_op, _backward, tensors, (*tensors, *rest))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *cotangents):
        from . import _dense

        dout, dlse, *operands = ctx.saved_tensors
        *numbers, _, _, wanted = ctx.rest
        found = _dense.second_order(dout, dlse, operands, Options(*numbers), wanted, cotangents)
        return (None, *found[:2], *in_place_of(found[2:], wanted, COUNT))


def _forward_autograd(*arguments):
    operands = arguments[:COUNT]
    if _needs(operands):
        return _Forward.apply(arguments[COUNT:], *operands)
    return _run(forward_op, _forward, operands, arguments)


def _backward_autograd(*arguments):
    tensors = arguments[: COUNT + 2]
    if _needs(tensors):
        return _Backward.apply(arguments[COUNT + 2 :], *tensors)
    return _run(backward_op, _backward, tensors, arguments)


# ---- Registration ----

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_modes = getattr(torch._C, "_len_torch_dispatch_stack", None)
_transforms = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
_profiled = getattr(torch.autograd, "_profiler_enabled", lambda: True)


def _plain(tensors):
    """Nobody but the kernel has a part in the call: no mode, transformation, profiler or subclass of tensors. Then the
    dispatcher, which costs 15 us for as many arguments, has nothing to dispatch to."""
    if _modes is None or _modes() or _transforms() or _profiled():
        return False
    first = tensors[0]
    return (first.is_cpu or first.is_cuda) and all([t is None or type(t) in _PLAIN and not t.is_neg() for t in tensors])


def _run(op, kernel, tensors, arguments):
    """An operation below automatic differentiation."""
    if op is None or _plain(tensors):
        return kernel(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*arguments)


def _register():
    """Defines both operations; returns their callables, and what keeps them."""
    library = torch.library.Library("flashback", "DEF")
    backward = f"Tensor dout, Tensor? dlse, {_SCHEMA}, Tensor out, Tensor lse, bool[] wanted"
    rows = (
        ("forward", f"({_SCHEMA}) -> (Tensor, Tensor)", _forward, _forward_fake, _forward_autograd),
        ("backward", f"({backward}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", _backward, _backward_fake,
         _backward_autograd),
    )  # fmt: skip
    for name, schema, kernel, fake, autograd in rows:
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        for device in ("CPU", "CUDA"):
            library.impl(name, kernel, device)
        library.impl(name, autograd, "Autograd")
        torch.library.register_fake(f"flashback::{name}", fake, lib=library)
    return torch.ops.flashback.forward.default, torch.ops.flashback.backward.default, library


forward_op = backward_op = None
if hasattr(torch.library, "register_fake"):  # PyTorch 2.4
    forward_op, backward_op, _library = _register()


# ---- From the public functions ----


def _autocast_type(device):
    """The type that autocast asks for on a device, or None."""
    if device not in _DEVICES:
        return None
    if hasattr(torch, "get_autocast_dtype"):
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    if device == "cpu":
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None


def _longest(cu, given, total):
    if given is not None:
        return given
    if _compiling():
        return total
    return int((cu[1:] - cu[:-1]).max()) if cu is not None and cu.dim() == 1 and cu.numel() > 1 else 0


_compiling = getattr(getattr(torch, "compiler", None), "is_compiling", lambda: False)


def _call(arguments):
    """The operation, by the shortest way."""
    if _compiling():
        return forward_op(*arguments)
    if _transforms():
        from . import _func

        return _func.Forward.apply(*arguments)
    return _forward_autograd(*arguments)


def _cast(tensor, dtype):
    narrow = tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(dtype) if narrow else tensor


def resolve(q, k, v, arguments):
    """(kind, operands, options) of _engine.py: layouts, autocast, and the type of sinks are dealt with."""
    if arguments.layout == "blhd" and not arguments.packed:
        q, k, v = (_swap(t, n) for t, n in ((q, "q"), (k, "k"), (v, "v")))
    operands = list(arguments.operands(q, k, v))
    dtype = _autocast_type(q.device.type)
    if dtype is not None:
        operands[:4] = (_cast(t, dtype) for t in operands[:4])
    if operands[6] is not None and operands[6].is_floating_point():
        operands[6] = operands[6].to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    longest = (0, 0)
    if arguments.packed:
        longest = (
            _longest(arguments.cu_seqlens_q, arguments.max_seqlen_q, q.shape[0]),
            _longest(arguments.cu_seqlens_k, arguments.max_seqlen_k, k.shape[0]),
        )
    deterministic = arguments.deterministic
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    return tensors, operands, arguments.options(deterministic, longest)


def _swap(tensor, name):
    if tensor.dim() != 4:
        raise ValueError(
            f"{name} has shape {list(tensor.shape)}, expected 4 dimensions: [batch, length, heads, head_dim]"
        )
    return tensor.transpose(1, 2)


def attention(q, k, v, arguments):
    """out and lse, with gradients."""
    _, operands, options = resolve(q, k, v, arguments)
    out, lse = _call((*operands, *options[:-1]))
    swapped = arguments.layout == "blhd" and not arguments.packed
    return (out.transpose(1, 2) if swapped else out), lse


def attention_vjp(dout, dlse, q, k, v, out, lse, arguments, wanted):
    """Gradients as a list of five."""
    swapped = arguments.layout == "blhd" and not arguments.packed
    _, operands, options = resolve(q, k, v, arguments)
    if swapped:
        dout, out = _swap(dout, "dout"), _swap(out, "out")
    found = _backward_autograd(dout, dlse, *operands, *options[:-1], out, lse, list(wanted))
    found = [x if w else None for x, w in zip(found, wanted)]
    return [x.transpose(1, 2) if swapped and n < 3 and x is not None else x for n, x in enumerate(found)]
