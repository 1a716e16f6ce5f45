"""NumPy: every option in both passes against float64, strided inputs, every layout, packed batches."""

import conftest
import pytest

np = pytest.importorskip("numpy", reason="needs the package numpy")
import flashback_attention as fa  # noqa: E402
import oracle  # noqa: E402

BATCH, HEADS, HEADS_KV, LEN_Q, LEN_K, DIM, DIM_V = 2, 4, 2, 19, 26, 16, 24
TYPES = {"f32": np.float32, "f16": np.float16, "f64": np.float64}


def options_of(rng):
    """Problems: what is added to a plain one."""
    mask = rng.random((BATCH, 1, LEN_Q, LEN_K)) < 0.7
    mask[1, 0, 3] = False
    bias = rng.standard_normal((1, HEADS, LEN_Q, 1))
    hole = rng.standard_normal((BATCH, 1, 1, LEN_K))
    hole[0, 0, 0, 5] = -np.inf
    blocks = rng.random((1, HEADS, 2, 2)) < 0.6
    blocks[0, :, :, 0] = True
    return {
        "plain": {},
        "causal": {"causal": True},
        "causal, top left": {"causal": True, "alignment": "top_left"},
        "window": {"window": (5, 3)},
        "window, left only": {"window": (4, None)},
        "causal window": {"causal": True, "window": (6, None)},
        "offset": {"causal": True, "position_offset": -4},
        "scale 0": {"scale": 0.0, "causal": True},
        "negative scale": {"scale": -0.7},
        "softcap": {"softcap": 1.5},
        "mask": {"mask": mask},
        "bias over rows": {"bias": bias},
        "bias over keys with -inf": {"bias": hole},
        "block mask": {"block_mask": fa.BlockMask(blocks, 16, 16)},
        "sinks": {"sinks": rng.standard_normal(HEADS)},
        "lengths": {"lens_q": np.array([7, LEN_Q], np.int32), "lens_k": np.array([LEN_K, 0], np.int32)},
        "all": {"causal": True, "window": (9, None), "softcap": 2.0, "mask": mask, "bias": hole, "scale": 0.3,
                "sinks": rng.standard_normal(HEADS)},
    }  # fmt: skip


NAMES = list(options_of(np.random.default_rng(0)))


def inputs(rng, dtype, len_q=LEN_Q, len_k=LEN_K):
    """q, k, v, dout and dlse, of numbers that the type has."""
    shapes = ((HEADS, len_q, DIM), (HEADS_KV, len_k, DIM), (HEADS_KV, len_k, DIM_V), (HEADS, len_q, DIM_V))
    q, k, v, dout = (rng.standard_normal((BATCH, *s)).astype(TYPES[dtype]) for s in shapes)
    stat = np.float64 if dtype == "f64" else np.float32
    return q, k, v, dout, rng.standard_normal((BATCH, HEADS, len_q)).astype(stat)


def typed(options, dtype):
    """Options as the library takes them."""
    kinds = {"bias": TYPES[dtype], "sinks": np.float64 if dtype == "f64" else np.float32}
    return {n: x.astype(kinds[n]) if n in kinds else x for n, x in options.items()}


def both_passes(q, k, v, dout, dlse, options):
    out, lse = fa.attention(q, k, v, return_lse=True, **options)
    grads = fa.attention_vjp(dout, q, k, v, out, lse, dlse=dlse, **options)
    return {"out": out, "lse": lse, **{n: x for n, x in grads._asdict().items() if x is not None}}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", TYPES)
def test_options(rng, name, dtype):
    q, k, v, dout, dlse = inputs(rng, dtype)
    options = typed(options_of(rng)[name], dtype)
    got = both_passes(q, k, v, dout, dlse, options)
    want, low = (f(*a, dout=dout, dlse=dlse, **options) for f, a in
                 ((oracle.attention, (q, k, v)), (oracle.low_of, (dtype, q, k, v))))  # fmt: skip
    assert set(got) == set(want)
    for tensor in want:
        oracle.compare(got[tensor], want[tensor], low[tensor], tensor, dtype)
    if name != "plain":
        plain = oracle.attention(q, k, v, dout=dout, dlse=dlse)
        changed = [t for t in ("out", "lse") if not np.allclose(plain[t], want[t], rtol=1e-3, atol=1e-3)]
        assert changed, "the option changes nothing, so the test proves nothing"


@pytest.mark.parametrize("route", ["fused", "vector", "unfused", "reference"])
def test_routes(rng, route):
    q, k, v, dout, dlse = inputs(rng, "f32", len_q=7)
    options = {"causal": True, "softcap": 2.0, "route": route}
    got = both_passes(q, k, v, dout, dlse, options)
    want = oracle.attention(q, k, v, dout=dout, dlse=dlse, causal=True, softcap=2.0)
    low = oracle.low_of("f32", q, k, v, dout=dout, dlse=dlse, causal=True, softcap=2.0)
    for tensor in want:
        oracle.compare(got[tensor], want[tensor], low[tensor], tensor, "f32")
    assert f"route: {route}" in fa.explain(q, k, v, **options)


def blhd(x):
    return np.ascontiguousarray(x.transpose(0, 2, 1, 3))


def test_layouts(rng):
    """B = H = L, where a mistake has no other sign than wrong numbers; and out lies in the order of q."""
    q, k, v, dout = (rng.standard_normal((4, 4, 4, 8)).astype(np.float32) for _ in range(4))
    out, lse = fa.attention(q, k, v, causal=True, return_lse=True)
    grads = fa.attention_vjp(dout, q, k, v, out, lse, causal=True)
    other = [blhd(x) for x in (q, k, v)]
    out2, lse2 = fa.attention(*other, causal=True, layout="blhd", return_lse=True)
    assert out.flags.c_contiguous and out2.flags.c_contiguous
    assert np.array_equal(out, out2.transpose(0, 2, 1, 3)) and np.array_equal(lse, lse2)
    grads2 = fa.attention_vjp(blhd(dout), *other, out2, lse2, causal=True, layout="blhd")
    for x, y in zip(grads[:3], grads2[:3]):
        assert y.flags.c_contiguous and np.array_equal(x, y.transpose(0, 2, 1, 3))
    views = [blhd(x).transpose(0, 2, 1, 3) for x in (q, k, v)]
    out3 = fa.attention(*views, causal=True)
    assert out3.strides == views[0].strides and np.array_equal(out, out3)


def test_strides(rng):
    """Slices of one projection, broadcast batches, rows with gaps, one element off: the bits of contiguous inputs."""
    whole = rng.standard_normal((2, 19, 3, 4, 16)).astype(np.float32)
    q, k, v = (whole[:, :, n].transpose(0, 2, 1, 3) for n in range(3))
    assert np.array_equal(fa.attention(q, k, v), fa.attention(*(np.ascontiguousarray(x) for x in (q, k, v))))
    one = np.broadcast_to(k[:1], k.shape)
    assert np.array_equal(fa.attention(q, one, v), fa.attention(q, np.ascontiguousarray(one), v))
    gaps = np.full((2, 4, 19, 21), np.nan, np.float32)[..., 1:17]
    gaps[...] = q
    assert np.array_equal(fa.attention(gaps, k, v), fa.attention(q, k, v))
    short = whole[:1, :1, 0, :1].transpose(0, 2, 1, 3)  # dimensions of size 1 with strides of their own
    assert fa.attention(short, short, short).tolist() == short.tolist()
    frozen = q.copy()
    frozen.flags.writeable = False
    assert np.array_equal(fa.attention(frozen, k, v), fa.attention(q, k, v))


def test_packed(rng):
    """Each sequence as if it were alone, with empty ones, and rows behind the last boundary."""
    lens_q, lens_k = [5, 0, 3, 9], [7, 2, 0, 4]
    cu_q, cu_k = (np.cumsum([0, *x]).astype(np.int32) for x in (lens_q, lens_k))
    q, dout = (rng.standard_normal((cu_q[-1], 4, d)).astype(np.float32) for d in (16, 8))
    k, v = (rng.standard_normal((cu_k[-1], 2, d)).astype(np.float32) for d in (16, 8))
    options = {"causal": True, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    out, lse = fa.attention(q, k, v, return_lse=True, **options)
    grads = fa.attention_vjp(dout, q, k, v, out, lse, **options)
    bound = fa.attention(q, k, v, max_seqlen_q=12, max_seqlen_k=12, **options)
    assert np.array_equal(bound, out) and out.shape == (17, 4, 8) and lse.shape == (4, 17)
    for n in range(4):
        at_q, at_k = slice(*cu_q[n : n + 2]), slice(*cu_k[n : n + 2])
        alone = [x[at].transpose(1, 0, 2)[None] for x, at in ((q, at_q), (k, at_k), (v, at_k))]
        want = oracle.attention(*alone, dout=dout[at_q].transpose(1, 0, 2)[None], causal=True)
        np.testing.assert_allclose(lse[:, at_q], want["lse"][0], rtol=1e-5, atol=1e-5)
        for got, name, at in (
            (out, "out", at_q),
            (grads.dq, "dq", at_q),
            (grads.dk, "dk", at_k),
            (grads.dv, "dv", at_k),
        ):
            np.testing.assert_allclose(got[at].transpose(1, 0, 2), want[name][0], rtol=1e-4, atol=1e-5, err_msg=name)


def test_rows_behind_the_last_boundary(rng):
    """They give 0 (lse: -inf) and get gradients of 0, whatever they hold: frameworks multiply with all rows."""
    cu = np.array([0, 4, 9], np.int32)
    q, dout = (rng.standard_normal((12, 4, 16)).astype(np.float32) for _ in range(2))
    k = rng.standard_normal((12, 2, 16)).astype(np.float32)
    options = {"causal": True, "cu_seqlens_q": cu, "cu_seqlens_k": cu}
    want, want_lse = fa.attention(q[:9], k[:9], k[:9], return_lse=True, **options)
    right = fa.attention_vjp(dout[:9], q[:9], k[:9], k[:9], want, want_lse, **options)
    q[9:], k[9:], dout[9:] = np.nan, np.inf, np.nan
    out, lse = fa.attention(q, k, k, return_lse=True, **options)
    grads = fa.attention_vjp(dout, q, k, k, out, lse, **options)
    assert (lse[:, 9:] == -np.inf).all() and np.array_equal(lse[:, :9], want_lse)
    for got, there in zip((out, *grads[:3]), (want, *right[:3])):
        assert (got[9:] == 0).all() and np.array_equal(got[:9], there)


def test_wanted(rng):
    q, k, v, dout, _ = inputs(rng, "f32")
    out, lse = fa.attention(q, k, v, return_lse=True)
    some = fa.attention_vjp(dout, q, k, v, out, lse, wanted=("dk",))
    every = fa.attention_vjp(dout, q, k, v, out, lse)
    assert [x is None for x in some] == [True, False, True, True, True] and np.array_equal(some.dk, every.dk)
    with pytest.raises(ValueError, match="wanted has .'dx'."):
        fa.attention_vjp(dout, q, k, v, out, lse, wanted=("dx",))


def test_empty():
    """Sizes of 0 are legal."""
    for lengths in ((0, 5), (5, 0), (0, 0)):
        q, k = (np.ones((2, 3, n, 4), np.float32) for n in lengths)
        out, lse = fa.attention(q, k, k, return_lse=True)
        assert (out == 0).all() and (lse == -np.inf).all()
        grads = fa.attention_vjp(np.ones_like(out), q, k, k, out, lse)
        assert all((x == 0).all() for x in grads[:3]) and grads.dk.shape == k.shape


def test_bfloat16(rng):
    ml_dtypes = conftest.need("ml_dtypes", "NumPy's bfloat16")
    q, k, v = (rng.standard_normal((2, 3, 9, 16)).astype(ml_dtypes.bfloat16) for _ in range(3))
    out = fa.attention(q, k, v, causal=True)
    assert out.dtype == q.dtype
    want, low = (f(*a, causal=True) for f, a in ((oracle.attention, (q, k, v)), (oracle.low_of, ("bf16", q, k, v))))
    oracle.compare(out, want["out"], low["out"], "out", "bf16")


def test_window_counts():
    """q = k = 0: LSE is the logarithm of how many keys count."""
    q, v = np.zeros((1, 1, 9, 4), np.float32), np.zeros((1, 1, 9, 4), np.float32)
    _, lse = fa.attention(q, q, v, causal=True, window=(2, 0), return_lse=True)
    np.testing.assert_allclose(np.exp(lse[0, 0]), [1, 2, 3, 3, 3, 3, 3, 3, 3], rtol=1e-6)
