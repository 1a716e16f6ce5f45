"""MLX's grid for its fused attention, with mlx itself (its CPU backend, in f32) as the oracle: lengths around tiles,
one query, grouped heads, odd widths, every kind of mask, both layouts, sinks, and gradients."""

import itertools

import conftest
import pytest

np = pytest.importorskip("numpy", reason="needs the package numpy")
if not conftest.importlib.util.find_spec("mlx"):
    pytest.skip("needs the package mlx[cpu]", allow_module_level=True)
import flashback_attention as fa  # noqa: E402
import mlx.core as mx  # noqa: E402

SQUARE = [
    (20, 20, 64, 3, 3),
    (63, 63, 64, 24, 24),
    (129, 129, 64, 24, 24),
    (400, 400, 64, 24, 24),
    (128, 128, 64, 32, 32),
]
MIXED = [(64, 128, 64, 32, 32), (65, 128, 64, 32, 8), (64, 127, 64, 32, 8), (65, 127, 64, 32, 8), (127, 65, 64, 32, 8)]
WIDE = [(128, 128, 128, 32, 8), (64, 128, 128, 32, 8), (65, 127, 128, 32, 8), (127, 65, 128, 32, 8)]
DECODE = [(1, n, 128, 32, h) for n in (7, 9, 32, 63, 67, 129, 400, 2000) for h in (32, 8)]
ODD = [(33, 65, d, 4, 2) for d in (72, 96, 256)]
SHAPES = SQUARE + MIXED + WIDE + DECODE + ODD
FEW = [SQUARE[0], MIXED[1], MIXED[4], WIDE[2], DECODE[3], ODD[0]]
BOUND = {np.float32: 2e-5, np.float16: 6e-4}  # the oracle is f32, so f16 gets half a unit of its own for rounding


def masks(rng, kind, len_q, len_k, heads):
    """(our options, MLX's mask)."""
    if kind == "causal":
        return {"causal": True}, "causal"
    if kind == "bool":
        keep = rng.random((1, 1, len_q, len_k)) < 0.7
        keep[..., 0] = True
        return {"mask": keep}, keep
    if kind == "additive":
        added = rng.standard_normal((1, heads, len_q, len_k))
        return {"bias": added}, added
    return {}, None


def both(rng, shape, dtype, kind, layout):
    len_q, len_k, dim, heads, heads_kv = shape
    sizes = (heads, len_q), (heads_kv, len_k), (heads_kv, len_k)
    q, k, v = (rng.standard_normal((1, *s, dim)).astype(dtype) for s in sizes)
    ours, theirs = masks(rng, kind, len_q, len_k, heads)
    ours = {n: x.astype(dtype) if n == "bias" else x for n, x in ours.items()}
    if isinstance(theirs, np.ndarray):
        theirs = mx.array(theirs if theirs.dtype == bool else theirs.astype(dtype).astype(np.float32))
    wide = [mx.array(x.astype(np.float32)) for x in (q, k, v)]
    want = np.array(mx.fast.scaled_dot_product_attention(*wide, scale=dim**-0.5, mask=theirs))
    if layout == "blhd":
        q, k, v = (np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in (q, k, v))
    got = fa.attention(q, k, v, layout=layout, **ours)
    return (got if layout == "bhld" else got.transpose(0, 2, 1, 3)), want


def check(rng, shape, dtype, kind, layout):
    got, want = both(rng, shape, dtype, kind, layout)
    first = max(0, shape[0] - shape[1]) if kind == "causal" else 0  # rows without a key: zero here, undefined there
    assert (got[:, :, :first] == 0).all()
    got, want = got[:, :, first:].astype(np.float64), want[:, :, first:]
    error = np.abs(got - want) - BOUND[dtype] * np.abs(want)
    assert np.isfinite(got).all() and error.max() <= BOUND[dtype], error.max()


@pytest.mark.parametrize("kind", ["none", "causal", "bool", "additive"])
@pytest.mark.parametrize("shape", FEW, ids=str)
def test_few(rng, shape, kind):
    check(rng, shape, np.float32, kind, "bhld")


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_grid(rng, shape, dtype):
    for kind, layout in itertools.product(["none", "causal", "bool", "additive"], ["bhld", "blhd"]):
        check(rng, shape, dtype, kind, layout)


@pytest.mark.parametrize("len_q, len_k, heads_kv", [(1, 128, 2), (128, 128, 8), (1, 700, 8), (128, 700, 2)])
def test_sinks(rng, len_q, len_k, heads_kv):
    q = rng.standard_normal((2, 8, len_q, 64)).astype(np.float32)
    k, v = (rng.standard_normal((2, heads_kv, len_k, 64)).astype(np.float32) for _ in range(2))
    sinks = (10 * rng.standard_normal(8)).astype(np.float32)
    want = mx.fast.scaled_dot_product_attention(
        mx.array(q), mx.array(k), mx.array(v), scale=0.125, sinks=mx.array(sinks)
    )
    np.testing.assert_allclose(fa.attention(q, k, v, sinks=sinks), np.array(want), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", ["none", "causal", "bool"])
@pytest.mark.parametrize("heads", [8, 32])
def test_gradients(rng, kind, heads):
    q, k, v = (rng.standard_normal((2, h, 128, 64)).astype(np.float32) for h in (heads, 8, 8))
    ours, theirs = masks(rng, kind, 128, 128, heads)
    theirs = mx.array(theirs) if isinstance(theirs, np.ndarray) else theirs
    call = lambda q, k, v: mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, mask=theirs)
    _, want = mx.vjp(call, [mx.array(x) for x in (q, k, v)], [mx.ones(q.shape)])
    out, lse = fa.attention(q, k, v, return_lse=True, **ours)
    got = fa.attention_vjp(np.ones_like(out), q, k, v, out, lse, **ours)
    for x, y in zip(got[:3], want):
        np.testing.assert_allclose(x, np.array(y), rtol=1e-3, atol=2e-5)


def test_unusual(rng):
    """Keys of -inf in one channel give no NaN; a window's mask at a tile's edge; far keys behind a mask of -1e4."""
    q, k, v = (rng.standard_normal((1, 2, 8, 64)).astype(np.float32) for _ in range(3))
    k[..., 0] = -np.inf
    assert np.isfinite(fa.attention(np.abs(q), k, v)).all()
    q, k, v = (rng.standard_normal((1, 2, 128, 64)).astype(np.float32) for _ in range(3))
    i, j = np.arange(128)[:, None], np.arange(128)[None]
    keep = ((j <= i) & (j > i - 111))[None, None]
    with np.errstate(divide="ignore"):
        added = np.log(keep).astype(np.float32)
    windowed = fa.attention(q, k, v, causal=True, window=(110, 0))
    for options in ({"mask": keep}, {"bias": added}):
        np.testing.assert_allclose(fa.attention(q, k, v, **options), windowed, rtol=1e-5, atol=1e-6)
    k, v = (rng.standard_normal((1, 1, 66048, 8)).astype(np.float32) for _ in range(2))
    far = np.full((1, 1, 1, 66048), -1e4, np.float32)
    far[..., -1024:] = 0
    q = q[:, :, :5, :8].copy()
    np.testing.assert_allclose(fa.attention(q, k, v, bias=far), fa.attention(q, k[:, :, -1024:], v[:, :, -1024:]),
                               rtol=1e-5, atol=1e-6)  # fmt: skip
