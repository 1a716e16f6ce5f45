"""The public functions. PyTorch's tensors go to _torch.py, other arrays to _arrays.py; both end in _engine.py."""

import ctypes as c
import sys
import typing

from . import _arrays, _engine, _library, _plan
from ._arguments import Arguments, BlockMask


class Gradients(typing.NamedTuple):
    """The vector-Jacobian product of attention; None for what was not asked for. Each has shape and type of its
    input."""

    dq: typing.Any
    dk: typing.Any
    dv: typing.Any
    dbias: typing.Any = None
    dsinks: typing.Any = None


def attention(
    q: typing.Any,
    k: typing.Any,
    v: typing.Any,
    *,
    causal: bool = False,
    window: typing.Optional[tuple[typing.Optional[int], typing.Optional[int]]] = None,
    scale: typing.Optional[float] = None,
    softcap: float = 0.0,
    bias: typing.Any = None,
    mask: typing.Any = None,
    block_mask: typing.Optional[BlockMask] = None,
    sinks: typing.Any = None,
    cu_seqlens_q: typing.Any = None,
    cu_seqlens_k: typing.Any = None,
    alignment: str = "bottom_right",
    deterministic: typing.Optional[bool] = None,
    route: str = "auto",
    return_lse: bool = False,
    layout: str = "bhld",
    lens_q: typing.Any = None,
    lens_k: typing.Any = None,
    position_offset: int = 0,
    max_seqlen_q: typing.Optional[int] = None,
    max_seqlen_k: typing.Optional[int] = None,
) -> typing.Any:
    """Exact attention in O(L) memory: softmax(scale * q k^T + bias, masked) v, and its logsumexp.

        S = scale * q.k     softcap: S = c*tanh(S/c)     + bias     cells that do not count removed
        LSE = ln(sum_j exp(S) + exp(sink))       P = exp(S - LSE)       O = P V

    Arrays are NumPy's, PyTorch's (CPU or CUDA, with gradients), or any with DLPack on the CPU; all of one device.
    Inputs are taken as they lie: strides are free but for the last one, which is 1, and nothing is copied.

    Args:
        q: queries [B,Hq,Lq,D] of f32, f16, bf16 or f64 (f64 on the CPU only); [total_q,Hq,D] with cu_seqlens.
        k: keys [B,Hkv,Lk,D] of q's type; Hq is a multiple of Hkv, and query head h reads key head h // (Hq/Hkv).
        v: values [B,Hkv,Lk,Dv].
        causal: key j counts for query i iff j <= p = i + off, off = Lk - Lq (bottom_right) or 0 (top_left).
        window: (left, right), in keys, both ends included: p - left <= j <= p + right; None or -1 does not bound. A
            sliding window of W keys that counts the query itself is (W - 1, 0). `causal` sets right to 0.
        scale: any finite number, 0 and negative ones included; None is 1/sqrt(D).
        softcap: c > 0, or 0 for none.
        bias: added to the scores after softcap: q's type, [B|1,Hq|1,Lq|1,Lk|1]; -inf removes a cell.
        mask: boolean [B|1,Hq|1,Lq|1,Lk|1], True keeps a cell.
        block_mask: a BlockMask, the same for blocks of cells; blocks that are off cost nothing.
        sinks: one logit per query head [Hq], which joins the denominator only; f32 (f64 for f64).
        cu_seqlens_q, cu_seqlens_k: int32 [B+1] from 0, ascending: sequences lie end to end in [total,H,D]. On the CPU
            they are checked; on a GPU wrong ones read outside of their sequence. Rows behind the last boundary give
            out 0, lse -inf and gradients of 0.
        alignment: "bottom_right" or "top_left", see causal.
        deterministic: bits equal from run to run. None: as torch.are_deterministic_algorithms_enabled() says, for
            PyTorch's tensors. On the CPU always so.
        route: "auto", "fused", "vector", "unfused" or "reference"; any but auto is taken or refused, never replaced.
        return_lse: also give LSE.
        layout: "bhld" as above, or "blhd": q, k, v and the result are [B,L,H,D]. Packed batches have one layout.
        lens_q, lens_k: int32 [B], how many rows of each padded batch entry count. They move no positions.
        position_offset: added to all positions p, for a chunk of a longer sequence.
        max_seqlen_q, max_seqlen_k: the longest sequences of a packed batch, or a bound. None: read from cu_seqlens;
            for PyTorch's tensors on a GPU that waits for the GPU, and in compiled graphs the total is taken.

    Returns:
        out: [B,Hq,Lq,Dv] (as q: [total_q,Hq,Dv], or [B,Lq,Hq,Dv]) of q's type, dense, with its dimensions in memory in
        the order of q's. With return_lse a pair (out, lse): lse is the natural logarithm [B,Hq,Lq], [Hq,total_q] for
        packed batches, f32 (f64 for f64). A row without a cell that counts has out 0 and lse -inf.

    Raises:
        ValueError: an argument is wrong; the sentence names it, what came and what was expected.
        Unsupported: (a ValueError) meaningful, but not offered on this device or route.
        TypeError: an argument of the wrong kind or element type.
        NoDevice: (a RuntimeError) the device, its driver or its compiler is missing.
        RuntimeError: the device reported an error, or a kernel did not compile.
        MemoryError: memory ran out.
    """
    arguments = Arguments(causal, window, scale, softcap, bias, mask, block_mask, sinks, cu_seqlens_q, cu_seqlens_k,
                          alignment, deterministic, route, layout, lens_q, lens_k, position_offset, max_seqlen_q,
                          max_seqlen_k)  # fmt: skip
    torch_side = _torch_side(q, k, v, arguments)
    if torch_side:
        out, lse = torch_side.attention(q, k, v, arguments)
    else:
        operands, options = _prepare(q, k, v, arguments)
        out, lse = _engine.forward(_arrays.arrays, operands, options)
        out, lse = _result(out, q, arguments), _result(lse, q)
    return (out, lse) if return_lse else out


def attention_vjp(
    dout: typing.Any,
    q: typing.Any,
    k: typing.Any,
    v: typing.Any,
    out: typing.Any,
    lse: typing.Any,
    *,
    dlse: typing.Any = None,
    wanted: typing.Sequence[str] = ("dq", "dk", "dv", "dbias", "dsinks"),
    **arguments: typing.Any,
) -> Gradients:
    """The vector-Jacobian product of `attention`, for arrays without automatic differentiation.

        delta = rowsum(dO * O)    dP = dO V^T    dS = P * (dP - delta + dLSE)    (softcap: dS *= 1 - tanh^2)
        dQ = scale*dS K    dK = scale*dS^T Q    dV = P^T dO    dbias = dS before softcap's factor
        dsink = sum_i exp(sink - LSE) * (dLSE - delta)

    Args:
        dout: the cotangent of out, laid out as out, or any other strides but for the last.
        q, k, v: as given to `attention`.
        out, lse: as `attention(..., return_lse=True)` gave them. They may also be those of a larger problem of which
            these keys are a part: the result is then this part's share.
        dlse: the cotangent of lse, or None.
        wanted: which gradients; dbias and dsinks are given where there is a bias and there are sinks.
        arguments: the keywords that `attention` was called with, but for return_lse.

    Returns:
        Gradients(dq, dk, dv, dbias, dsinks), None for what is not wanted. Sums over broadcast dimensions are in dbias.

    Raises: as `attention`.
    """
    arguments = Arguments(**arguments)
    unknown = set(wanted) - set(_plan.GRADIENTS)
    if unknown:
        raise ValueError(f"wanted has {sorted(unknown)}, expected some of: {', '.join(_plan.GRADIENTS)}")
    has = dict(zip(_plan.GRADIENTS, (q, k, v, arguments.bias, arguments.sinks)))
    chosen = tuple(name in wanted and has[name] is not None for name in _plan.GRADIENTS)
    torch_side = _torch_side(q, k, v, arguments, dout=dout, out=out, lse=lse, dlse=dlse)
    if torch_side:
        return Gradients(*torch_side.attention_vjp(dout, dlse, q, k, v, out, lse, arguments, chosen))
    operands, options = _prepare(q, k, v, arguments)
    dout, out, lse = (_arrays.view(t, n) for t, n in ((dout, "dout"), (out, "out"), (lse, "lse")))
    dlse = None if dlse is None else _arrays.view(dlse, "dlse")
    if arguments.layout == "blhd" and not arguments.packed:
        dout, out = _swap(dout, "dout"), _swap(out, "out")
    found = _engine.backward(_arrays.arrays, dout, dlse, operands, out, lse, options, chosen)
    return Gradients(*(_result(x, q, arguments if n < 3 else None) for n, x in enumerate(found)))


def explain(q: typing.Any, k: typing.Any, v: typing.Any, **arguments: typing.Any) -> str:
    """What a call does, in words: problem, route, kernels, instruction set, tiles, threads, workspace, and for each
    route that is passed over the reason. Takes what `attention` takes, makes a plan for both passes and runs nothing.

    Raises: as `attention`.
    """
    arguments = Arguments(**arguments)
    kind, operands, options = _resolve(q, k, v, arguments)
    return _engine.explain(kind, operands, options)


def supported(q: typing.Any, k: typing.Any, v: typing.Any, **arguments: typing.Any) -> tuple[bool, str]:
    """(True, "") if `attention` takes these arguments, otherwise (False, reason). Compiles and runs nothing."""
    try:
        return _engine.supported(*_resolve(q, k, v, Arguments(**arguments)))
    except (ValueError, TypeError) as error:
        return False, str(error)


def info() -> str:
    """What this library is on this machine: version, backends, instruction sets, threads, environment variables and
    their values, one "key: value" a line. `flashback info` prints the same."""
    return _library.text(_library.lib.fb_info)


def clear_plans() -> None:
    """Forgets all plans. Plans hold what the environment said when they were made."""
    _plan.cache.clear()


# ---- Between the two ----


def _torch_side(q, k, v, arguments, **more):
    """_torch.py if the operands are PyTorch's, otherwise None."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    arguments.check()
    given = *arguments.operands(q, k, v), *more.values()
    others = [n for n, t in enumerate(given) if not isinstance(t, torch.Tensor) and (t is not None or n < 3)]
    if not others:
        return _torch or _torch_module()
    if not any(isinstance(t, torch.Tensor) for t in given):
        return None
    name, kind = (*_plan.PUBLIC, *more)[others[0]], type(given[others[0]]).__name__
    raise TypeError(f"{name} is of type {kind}, but others are PyTorch's tensors; torch.as_tensor makes one of it")


_torch = None  # the module, once a tensor has come; found by its name it would cost a microsecond in every call


def _torch_module():
    global _torch
    from . import _torch as module

    _torch = module
    return module


def _resolve(q, k, v, arguments):
    """(kind, operands, options) of _engine.py."""
    torch_side = _torch_side(q, k, v, arguments)
    if torch_side:
        return torch_side.resolve(q, k, v, arguments)
    return (_arrays.arrays, *_prepare(q, k, v, arguments))


def _prepare(q, k, v, arguments):
    """Operands as views [B,H,L,D], and the options."""
    arguments.check()
    given = zip(_plan.PUBLIC, arguments.operands(q, k, v))
    views = {n: None if t is None and n not in ("q", "k", "v") else _arrays.view(t, n) for n, t in given}
    if arguments.layout == "blhd" and not arguments.packed:
        views.update({n: _swap(views[n], n) for n in ("q", "k", "v")})
    longest = (0, 0)
    if arguments.packed:
        longest = (
            _longest(views["cu_seqlens_q"], arguments.max_seqlen_q),
            _longest(views["cu_seqlens_k"], arguments.max_seqlen_k),
        )
    return tuple(views.values()), arguments.options(arguments.deterministic, longest)


def _swap(view, name):
    """A [B,L,H,D] view as [B,H,L,D], and the reverse."""
    if len(view.shape) != 4:
        raise ValueError(
            f"{name} has shape {list(view.shape)}, expected 4 dimensions: [batch, length, heads, head_dim]"
        )
    (b, l, h, d), (sb, sl, sh, sd) = view.shape, view.strides
    return view._replace(shape=(b, h, l, d), strides=(sb, sh, sl, sd))


def _longest(view, given):
    """The longest sequence of a packed batch: given, or read from its boundaries."""
    if given is not None:
        return int(given)
    if view is None or view.word != "i32" or len(view.shape) != 1 or view.shape[0] < 2 or view.strides[0] != 1:
        return 0  # nothing to read; what is wrong with it is said when the plan is made
    cu = (c.c_int32 * view.shape[0]).from_address(view.data)
    return max(0, max(b - a for a, b in zip(cu, cu[1:])))


def _result(view, like, arguments=None):
    """The caller's kind of array; of [B,L,H,D] where the arguments say so."""
    if view is None:
        return None
    if arguments and arguments.layout == "blhd" and not arguments.packed:
        return _arrays.result(_arrays.swapped(view), like)
    return _arrays.result(view, like)
