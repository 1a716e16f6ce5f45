"""Attention and its gradients in float64, dense, in NumPy; and rule R12, which says how close is close enough.

Nothing here comes from the library. Cells are a boolean matrix; gradients follow from the softmax's Jacobian written
out, dS = P * (dP - sum_j P dP + dLSE), with the sink as one more column of value 0.
"""

import numpy as np


def cells(shape, causal=False, window=None, alignment="bottom_right", position_offset=0, mask=None, block_mask=None,
          lens_q=None, lens_k=None, bias=None):  # fmt: skip
    """Which cells count, [B,H,Lq,Lk]."""
    batch, heads, len_q, len_k = shape
    i, j = np.arange(len_q)[:, None], np.arange(len_k)[None]
    p = i + position_offset + (len_k - len_q if alignment == "bottom_right" else 0)
    left, right = window or (None, None)
    allowed = np.ones(shape, bool)
    if left not in (None, -1):
        allowed &= j >= p - left
    if causal or right not in (None, -1):
        allowed &= j <= p + (0 if causal else right)
    if mask is not None:
        allowed &= mask
    if block_mask is not None:
        blocks, block_q, block_k = block_mask
        allowed &= blocks[:, :, i // block_q, j // block_k]
    if lens_q is not None:
        allowed &= i < np.asarray(lens_q)[:, None, None, None]
    if lens_k is not None:
        allowed &= j < np.asarray(lens_k)[:, None, None, None]
    if bias is not None:
        allowed &= bias != -np.inf
    return allowed


def reduced(x, shape):
    """Sums over the dimensions that `shape` repeats."""
    return x.sum(axis=tuple(n for n, size in enumerate(shape) if size == 1 and x.shape[n] != 1), keepdims=True)


def exact(x):
    return x


def attention(q, k, v, dout=None, dlse=None, scale=None, softcap=0.0, bias=None, sinks=None, dtype=np.float64,
              fit=exact, **masks):  # fmt: skip
    """A dict of out and lse, and with dout of dq, dk, dv, dbias, dsinks, computed in `dtype`; `fit` rounds what the
    plain formula keeps in memory, and the mean of dP then comes from the out that it keeps."""
    q, k, v = (np.asarray(x, dtype) for x in (q, k, v))
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scale = dtype(q.shape[-1] ** -0.5 if scale is None else scale)
    raw = fit(np.einsum("bhid,bhjd->bhij", q, k) * scale)
    s = capped = softcap * np.tanh(raw / dtype(softcap)) if softcap else raw
    if bias is not None:
        bias = np.asarray(bias, dtype)
        s = s + np.where(bias == -np.inf, 0, bias)
    allowed = cells(s.shape, bias=bias, **masks)
    s = np.where(allowed, s, -np.inf)
    sink = np.full((1, heads, 1, 1), -np.inf, dtype)
    if sinks is not None:
        sink[0, :, 0, 0] = sinks
    m = np.maximum(s.max(-1, keepdims=True, initial=-np.inf), sink)
    m = np.where(m == -np.inf, 0, m)
    e, e_sink = np.where(allowed, np.exp(s - m), 0), np.exp(sink - m)
    z = e.sum(-1, keepdims=True) + e_sink
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = np.where(z == 0, -np.inf, m + np.log(z))
        p, p_sink = fit(np.where(z == 0, 0, e / z)), np.where(z == 0, 0, e_sink / z)
    found = {"out": fit(np.einsum("bhij,bhjd->bhid", p, v)), "lse": lse[..., 0]}
    if dout is None:
        return found
    dout = np.where(z == 0, 0, np.asarray(dout, dtype))
    extra = 0 if dlse is None else np.where(z == 0, 0, np.asarray(dlse, dtype)[..., None])
    dp = fit(np.einsum("bhid,bhjd->bhij", dout, v))
    mean = (p * dp).sum(-1, keepdims=True) if fit is exact else (dout * found["out"]).sum(-1, keepdims=True)
    ds = fit(p * (dp - mean + extra))
    if bias is not None:
        found["dbias"] = fit(reduced(ds, bias.shape))
    if sinks is not None:
        found["dsinks"] = (p_sink * (extra - mean)).sum((0, 2, 3))
    if softcap:
        ds = ds * (1 - (capped / dtype(softcap)) ** 2)
    batch, _, len_k, _ = k.shape
    grouped = lambda x: x.reshape(batch, heads // group, group, len_k, x.shape[-1]).sum(2)
    found["dq"] = fit(scale * np.einsum("bhij,bhjd->bhid", ds, k))
    dk, dv = scale * np.einsum("bhij,bhid->bhjd", ds, q), np.einsum("bhij,bhid->bhjd", p, dout)
    found["dk"], found["dv"] = fit(grouped(dk)), fit(grouped(dv))
    return found


def rounded(x, bits):
    """To nearest even, to a type of `bits` explicit bits of mantissa and f32's exponents (bf16: 7) or f16 (10)."""
    x = np.asarray(x)
    if bits == 10:
        return x.astype(np.float16).astype(x.dtype)
    if bits == 7:
        word = np.ascontiguousarray(x, np.float32).view(np.uint32)
        word = (word + 0x7FFF + ((word >> 16) & 1)) & np.uint32(0xFFFF0000)
        return np.where(np.isfinite(x), word.view(np.float32), x).astype(x.dtype)
    return x


BITS = {"f16": 10, "bf16": 7, "f32": 23, "f64": 52}


def compare(got, want, low, name, dtype):
    """R12: for every batch entry and head, |got - want| <= 2 |low - want| for out and lse and 3 for gradients, plus
    1e-5 for f32 and 1e-10 of the largest value for f64; at least one unit in the last place of it for 16 bits, as low
    may be right by luck, and for lse, which is f32, at least what f32 has. NaN on one side only is a failure. Returns
    the largest part of what is allowed that was used."""
    got, want, low = (np.asarray(x, np.float64) for x in (got, want, low))
    assert got.shape == want.shape, f"{name} has shape {got.shape}, expected {want.shape}"
    assert (np.isfinite(got) == np.isfinite(want)).all(), f"{name}: not finite on one side only"
    assert (got[~np.isfinite(want)] == want[~np.isfinite(want)]).all(), f"{name}: infinities differ"
    worst = 0.0
    slabs = got.shape[: max(got.ndim - 2, 0)] if name != "lse" else got.shape[:-1]
    for at in np.ndindex(*slabs):
        g, w, l = got[at], want[at], low[at]
        ok = np.isfinite(w)
        if not ok.any():
            continue
        largest = np.abs(w[ok]).max()
        allowed = (2 if name in ("out", "lse") else 3) * np.abs(np.where(np.isfinite(l), l, w)[ok] - w[ok]).max()
        if name == "lse" and dtype != "f64":
            allowed = max(allowed, 1e-5 + 2e-6 * largest)
        elif dtype in ("f16", "bf16"):
            allowed = max(allowed, 1e-5, largest * 2.0 ** -BITS[dtype])
        else:
            allowed += {"f32": 1e-5, "f64": 1e-10 * max(largest, 1)}[dtype]
        error = np.abs(g[ok] - w[ok]).max()
        assert error <= allowed, f"{name}{list(at)}: error {error:.3e}, allowed {allowed:.3e}, largest {largest:.3e}"
        worst = max(worst, error / allowed)
    return worst


def low_of(dtype, *operands, **problem):
    """The plain formula as anyone would write it in a type: S, P, O, dP, dS and the results are rounded to it, and sums
    are in f32. In float64 it is the formula itself, for which `compare` has a bound of its own."""
    single = np.float64 if dtype == "f64" else np.float32
    return attention(*operands, dtype=single, fit=lambda x: rounded(x, BITS[dtype]), **problem)
