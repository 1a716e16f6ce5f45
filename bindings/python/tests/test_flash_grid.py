"""flash-attention's grid and its rule: with ref the formula in f32 on the same inputs and pt the formula in the input
type, in another order of operations, max|out - ref| <= 2 max|pt - ref|, and 3 for gradients (2 and 1e-5 where it is
causal).

A sample runs by default and on a GPU with `-m cuda`, the grid with `-m long` and, after minutes of compiling, on a GPU
with `-m cuda_long`."""

import itertools

import pytest

torch = pytest.importorskip("torch", reason="needs the package torch")
np = pytest.importorskip("numpy", reason="needs the package numpy")
import flashback_attention as fa  # noqa: E402

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
DIMS = [32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256]
LENGTHS = [
    (113, 203),
    (128, 217),
    (113, 211),
    (108, 256),
    (256, 512),
    (512, 256),
    (1024, 1024),
    (1023, 1024),
    (1024, 1023),
]
HEADS = {"mha": 6, "mqa": 1, "gqa": 2}  # of keys, for 6 of queries
KINDS = ["full", "causal", "local", "softcap"]


def plain(q, k, v, keep, softcap, upcast):
    """The dense formula; not upcast, in the input type, with the scale on k."""
    kind, group = q.dtype, q.shape[1] // k.shape[1]
    if upcast:
        q, k, v = (x.float() for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scale = q.shape[-1] ** -0.5
    s = (q * scale) @ k.mT if upcast else q @ (k * scale).mT
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    s = s.masked_fill(~keep, float("-inf"))
    p = torch.softmax(s.float(), dim=-1).to(s.dtype).masked_fill(~keep.any(-1, keepdim=True), 0)
    return (p.nan_to_num(0) @ v).to(kind)


def window_of(rng, kind, len_q, len_k, device):
    """(options, which cells count)."""
    i, j = torch.arange(len_q, device=device)[:, None], torch.arange(len_k, device=device)[None]
    p = i + len_k - len_q
    if kind == "causal":
        return {"causal": True}, j <= p
    if kind == "local":
        left, right = (int(x) for x in rng.integers(0, len_k, 2))
        return {"window": (left, right)}, (j >= p - left) & (j <= p + right)
    return ({"softcap": 50.0} if kind == "softcap" else {}), torch.ones_like(i * j, dtype=torch.bool)


def errors(function, operands, dout, ref):
    """Largest differences of out and gradients from a reference."""
    out = function(*operands)
    found = [out, *torch.autograd.grad(out, operands, dout)]
    for x in found:
        assert not x.isnan().any()
    return found, [(a.float() - b.float()).abs().max().item() for a, b in zip(found, ref or found)]


def check(rng, device, dtype, dim, lengths, heads, kind, factor=1.0):
    len_q, len_k = lengths
    shapes = (6, len_q), (HEADS[heads], len_k), (HEADS[heads], len_k), (6, len_q)
    batch = 2 if len_q * len_k < 2**16 else 1
    make = lambda h, n: torch.tensor(rng.standard_normal((batch, h, n, dim)), dtype=DTYPES[dtype], device=device)
    q, k, v, dout = (make(*s) for s in shapes)
    q = q * (50.0 if kind == "softcap" else factor)  # so that softcap bites
    options, keep = window_of(rng, kind, len_q, len_k, device)
    operands = [x.detach().requires_grad_() for x in (q, k * factor, v * factor)]
    softcap = options.get("softcap", 0.0)
    ref, _ = errors(lambda *x: plain(*x, keep, softcap, True), operands, dout, None)
    _, low = errors(lambda *x: plain(*x, keep, softcap, False), operands, dout, ref)
    _, got = errors(lambda *x: fa.attention(*x, **options), operands, dout, ref)
    names = ("out", "dq", "dk", "dv")
    for name, x, y in zip(names, got, low):
        bound = (2 if name == "out" or kind == "causal" else 3) * y + 1e-5
        assert x <= bound, f"{name}: error {x:.2e}, allowed {bound:.2e} (the plain formula's is {y:.2e})"


SAMPLE = [("f16", 64, (113, 203), "gqa", "causal"), ("bf16", 59, (128, 217), "mqa", "local"),
          ("bf16", 128, (108, 256), "mha", "full"), ("f16", 111, (113, 211), "gqa", "softcap"),
          ("bf16", 256, (113, 203), "gqa", "causal"), ("f16", 40, (512, 256), "mqa", "causal"),
          ("bf16", 96, (1023, 1024), "gqa", "local")]  # fmt: skip


@pytest.mark.parametrize("dtype, dim, lengths, heads, kind", SAMPLE)
def test_sample(rng, device, dtype, dim, lengths, heads, kind):
    check(rng, device, dtype, dim, lengths, heads, kind)


@pytest.mark.long
@pytest.mark.parametrize("dtype, dim", list(itertools.product(DTYPES, DIMS)))
def test_grid(rng, dtype, dim):
    for lengths, kind in [*itertools.product(LENGTHS[:6], KINDS), *itertools.product(LENGTHS[6:], ["causal"])]:
        check(rng, "cpu", dtype, dim, lengths, list(HEADS)[rng.integers(3)], kind)


@pytest.mark.cuda_long
@pytest.mark.parametrize("dtype, dim", list(itertools.product(DTYPES, DIMS)))
def test_grid_on_a_gpu(rng, dtype, dim):
    if not torch.cuda.is_available():
        pytest.skip("this test needs an NVIDIA GPU, and PyTorch sees none")
    for lengths, kind in itertools.product(LENGTHS, KINDS):
        check(rng, "cuda", dtype, dim, lengths, list(HEADS)[rng.integers(3)], kind)


@pytest.mark.parametrize("causal", ["full", "causal"])
@pytest.mark.parametrize("length", [97, 200, 257])
def test_large_numbers(rng, device, length, causal):
    """Queries of 5, keys and values of 5: what lies behind the last key must not reach dQ."""
    check(rng, device, "f16", 64, (length, length), "mha", causal, factor=5.0)


def test_packed_with_padding(rng, device):
    """Random lengths: packed results are those of each sequence alone, for all of out and gradients."""
    lens_q, lens_k = rng.integers(1, 60, 5), rng.integers(0, 80, 5)
    cu = [torch.tensor(np.cumsum([0, *x]), dtype=torch.int32, device=device) for x in (lens_q, lens_k)]
    make = lambda n, h: torch.tensor(
        rng.standard_normal((n, h, 64)), dtype=torch.bfloat16, device=device
    ).requires_grad_()
    q, k, v = make(lens_q.sum(), 6), make(lens_k.sum(), 2), make(lens_k.sum(), 2)
    out = fa.attention(q, k, v, causal=True, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1])
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), dout)
    parts = [x.split(n.tolist()) for x, n in ((q, lens_q), (k, lens_k), (v, lens_k), (dout, lens_q), (out, lens_q))]
    for n, (a, b, c, d, o) in enumerate(zip(*parts)):
        alone = [x.detach().transpose(0, 1)[None].contiguous().requires_grad_() for x in (a, b, c)]
        one = fa.attention(*alone, causal=True)
        want = torch.autograd.grad(one, alone, d.transpose(0, 1)[None])
        torch.testing.assert_close(o.transpose(0, 1)[None], one, rtol=2e-2, atol=2e-2)
        for x, y, lens in zip(got, want, (lens_q, lens_k, lens_k)):
            torch.testing.assert_close(x.split(lens.tolist())[n].transpose(0, 1)[None], y, rtol=2e-2, atol=2e-2)


def test_keys_far_fewer_than_queries(rng, device):
    """Sequences of 76, 34 and 146 queries and one key each: only the last query of each sees it."""
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 76, 110, 256], [0, 1, 2, 3]))
    make = lambda n: torch.tensor(rng.standard_normal((n, 1, 32)), dtype=torch.float16, device=device).requires_grad_()
    q, k, v = make(256), make(3), make(3)
    out = fa.attention(q, k, v, causal=True, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    last = torch.tensor([75, 109, 255], device=device)
    assert torch.equal(out[last], v) and out.abs().sum() == out[last].abs().sum()
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert torch.equal(dv, torch.ones_like(dv)) and dq.abs().max() < 1e-2 and dk.abs().max() < 1e-2


def test_the_same_bits(rng, device):
    """Repeated, and with a used workspace between: equal to the bit."""
    make = lambda h, n: torch.tensor(
        rng.standard_normal((4, h, n, 64)), dtype=torch.float16, device=device
    ).requires_grad_()
    operands = make(6, 239), make(2, 301), make(2, 301)
    run = lambda: (lambda out: [out, *torch.autograd.grad(out, operands, torch.ones_like(out))])(
        fa.attention(*operands, causal=True, deterministic=True))  # fmt: skip
    first = run()
    for _ in range(10):
        fa.attention(*(x.detach()[:1, :, :70] for x in operands))
        assert all(torch.equal(a, b) for a, b in zip(run(), first))


def test_transposed_cotangent(rng, device):
    q = torch.tensor(rng.standard_normal((2, 16, 4, 32)), dtype=torch.float16, device=device).requires_grad_()
    out = fa.attention(q, q, q, layout="blhd")
    dout = torch.randn_like(out).transpose(1, 2).contiguous().transpose(1, 2)
    got, want = (torch.autograd.grad(out, q, x, retain_graph=True)[0] for x in (dout, dout.contiguous()))
    assert torch.equal(got, want)
