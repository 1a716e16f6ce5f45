"""Random calls, right and wrong: each gives finite results of the promised shape or raises one of the errors that are
documented. The process must live through all of them."""

import os

import pytest

np = pytest.importorskip("numpy", reason="needs the package numpy")
import flashback_attention as fa  # noqa: E402

CALLS = 10_000
EXPECTED = (ValueError, TypeError, fa.NoDevice)
SIZES = [0, *range(1, 10), 17]
DTYPES = ["float32"] * 20 + ["float16", "float64", "int32", "bool", "complex64", ">f4"]
ODD = [None, 0, -1, 1, 1.5, float("nan"), float("inf"), "x", (), (1,), (1, 2, 3), True, 2**70, [], {}, object()]


def pick(rng, choices):
    return choices[rng.integers(len(choices))]


def array(rng, shape, dtype="float32"):
    """An array that may be strided, reversed, broadcast, frozen, unaligned or of another rank."""
    kind = np.dtype(dtype)
    x = np.zeros(shape, kind) if rng.random() < 0.1 else rng.standard_normal(shape).astype(kind)
    way = rng.integers(40)
    if way == 0 and x.ndim:
        x = np.repeat(x, 2, axis=-1)[..., ::2]
    elif way == 1 and x.ndim > 1:
        x = x[:, ::-1]
    elif way == 2 and x.ndim > 1 and len(x):
        x = np.broadcast_to(x[:1], (pick(rng, [1, 2]), *x.shape[1:]))
    elif way == 3:
        x.flags.writeable = False
    elif way == 4 and x.ndim > 2:
        x = x.swapaxes(1, 2)
    elif way == 5:
        raw = np.zeros(x.nbytes + 1, np.uint8)[1:]
        raw[:] = np.frombuffer(x.tobytes(), np.uint8)
        x = np.ndarray(x.shape, kind, raw)
    elif way == 6 and rng.random() < 0.3:
        x = x[None] if rng.random() < 0.5 else x[0] if x.ndim and len(x) else x
    return x


def problem(rng):
    """q, k, v and options that mostly belong together."""
    batch, kv, group, len_q, len_k, dim, dim_v = (pick(rng, SIZES) for _ in range(7))
    kind = pick(rng, DTYPES)
    shapes = [[batch, kv * group, len_q, dim], [batch, kv, len_k, dim], [batch, kv, len_k, dim_v]]
    if rng.random() < 0.1:
        shape = pick(rng, shapes)
        shape[rng.integers(4)] = pick(rng, SIZES)
    q, k, v = (array(rng, s, kind) for s in shapes)
    one_or = lambda n: 1 if rng.random() < 0.5 else n
    cells = (one_or(batch), one_or(kv * group), one_or(len_q), one_or(len_k))
    window = lambda: (int(rng.integers(-1, 6)), int(rng.integers(-1, 6)))
    makers = {
        "causal": lambda: bool(rng.integers(2)),
        "window": window,
        "scale": lambda: float(rng.standard_normal()),
        "softcap": lambda: float(abs(rng.standard_normal())),
        "bias": lambda: array(rng, cells, kind),
        "mask": lambda: array(rng, cells, "bool"),
        "block_mask": lambda: fa.BlockMask(array(rng, (1, 1, -(-len_q // 16), -(-len_k // 16)), "bool"), 16, 16),
        "sinks": lambda: array(rng, (kv * group,), pick(rng, ["float32", kind])),
        "lens_q": lambda: rng.integers(0, len_q + 1, batch).astype(np.int32),
        "lens_k": lambda: rng.integers(-1, len_k + 2, batch).astype(np.int32),
        "alignment": lambda: pick(rng, ["bottom_right", "top_left"]),
        "route": lambda: pick(rng, ["auto", "fused", "vector", "unfused", "reference", "quick"]),
        "layout": lambda: pick(rng, ["bhld", "bhld", "bhld", "blhd"]),
        "position_offset": lambda: int(rng.integers(-9, 9)),
        "deterministic": lambda: pick(rng, [None, True, False]),
        "cu_seqlens_q": lambda: np.sort(rng.integers(0, 9, 3)).astype(np.int32),
        "cu_seqlens_k": lambda: np.array([0, 3, 5], np.int32),
        "max_seqlen_q": lambda: int(rng.integers(-1, 9)),
    }  # fmt: skip
    chosen = {n: make() for n, make in makers.items() if rng.random() < (0.03 if "seqlen" in n else 0.12)}
    if rng.random() < 0.1:
        chosen[pick(rng, list(makers))] = pick(rng, ODD)
    if rng.random() < 0.03:
        q, k, v = rng.permutation(np.array([0, 1, 2])).tolist() if rng.random() < 0.2 else (q, pick(rng, ODD), v)
    return q, k, v, chosen


def results(q, k, v, options, rng):
    """Both passes."""
    out, lse = fa.attention(q, k, v, return_lse=True, **options)
    dout = array(rng, out.shape, out.dtype.name)
    grads = fa.attention_vjp(dout, q, k, v, out, lse, **options)
    return out, lse, grads


def finite(*arrays):
    return all(np.isfinite(x.astype(np.float64)).all() for x in arrays)


def test_random_calls(rng):
    done, refused = 0, {}
    for _ in range(int(os.environ.get("FLASHBACK_FUZZ_CALLS", CALLS))):
        q, k, v, options = problem(rng)
        try:
            out, lse, grads = results(q, k, v, options, rng)
        except EXPECTED as error:
            words = str(error)
            assert words, "an error without a sentence"
            refused[words.split()[0]] = refused.get(words.split()[0], 0) + 1
            continue
        done += 1
        assert out.shape[:-1] == q.shape[:-1] and out.shape[-1] == v.shape[-1] and out.dtype == q.dtype
        assert [x.shape for x in grads[:3]] == [q.shape, k.shape, v.shape]
        assert not np.isnan(lse).any() and (lse < np.inf).all()
        # Logits of 1e20 are multiples of 1e13: P of the backward may overflow where the sum has another order.
        if "float" in q.dtype.name and q.dtype.itemsize > 2 and abs(options.get("scale") or 0) < 1e6:
            assert finite(out, *grads[:3])
    print(f"{done} calls computed; refused, by the first word: {refused}")
    assert done > CALLS // 10 and sum(refused.values()) > CALLS // 10, "the calls are too much alike"


def test_random_calls_of_torch(rng):
    """The same through PyTorch's operations."""
    torch = pytest.importorskip("torch", reason="needs the package torch")
    tensor = lambda x: torch.as_tensor(x.copy()) if isinstance(x, np.ndarray) else x
    done = 0
    for _ in range(CALLS // 10):
        q, k, v, options = problem(rng)
        try:
            q, k, v = (tensor(x) for x in (q, k, v))
            options = {n: tensor(x) for n, x in options.items() if n != "block_mask"}
        except (TypeError, ValueError):
            continue  # types that PyTorch does not have
        try:
            leaves = [x.requires_grad_() for x in (q, k, v) if isinstance(x, torch.Tensor) and x.is_floating_point()]
            out = fa.attention(q, k, v, **options)
            if out.requires_grad:
                torch.autograd.grad(out.sum(), leaves)
        except EXPECTED:
            continue
        done += 1
        assert out.shape[:-1] == q.shape[:-1] and out.dtype == q.dtype
    assert done > CALLS // 100
