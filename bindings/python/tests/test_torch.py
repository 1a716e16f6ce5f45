"""PyTorch, eager: gradients of every differentiable operand, first and second order, opcheck, layouts, autocast,
threads, and torch.func. What is parametrised by `device` also runs on a GPU with `-m cuda`."""

import itertools

import pytest

torch = pytest.importorskip("torch", reason="needs the package torch")
np = pytest.importorskip("numpy", reason="needs the package numpy")
import flashback_attention as fa  # noqa: E402
import oracle  # noqa: E402
from torch.autograd import gradcheck, gradgradcheck  # noqa: E402

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def tensor(rng, *shape, dtype=torch.float32, device="cpu", grad=True):
    return torch.tensor(rng.standard_normal(shape), dtype=dtype, device=device).requires_grad_(grad)


def qkv(rng, device="cpu", dtype=torch.float32, batch=2, heads=4, heads_kv=2, len_q=13, len_k=17, dim=16, dim_v=16):
    shapes = (batch, heads, len_q, dim), (batch, heads_kv, len_k, dim), (batch, heads_kv, len_k, dim_v)
    return [tensor(rng, *s, dtype=dtype, device=device) for s in shapes]


def double(rng, *shape):
    return tensor(rng, *shape, dtype=torch.float64)


SMALL = {"len_q": 5, "len_k": 6, "dim": 3, "dim_v": 4, "dtype": torch.float64}


def small_problems(rng):
    """Tiny problems in float64 whose every gradient is checked: name: (operands, function)."""
    q, k, v = qkv(rng, **SMALL)
    bias, sinks = double(rng, 1, 4, 1, 6), double(rng, 4)
    mask = torch.tensor(rng.random((2, 1, 5, 6)) < 0.7)
    mask[0, 0, 2] = False
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 3, 7], [0, 4, 6, 9]))
    packed = [double(rng, n, h, d) for n, h, d in ((7, 4, 3), (9, 2, 3), (9, 2, 2))]
    lens = torch.tensor([3, 6], dtype=torch.int32)
    attention = lambda q, k, v, **o: fa.attention(q, k, v, return_lse=True, **o)
    return {
        "plain": ((q, k, v), attention),
        "out only": ((q, k, v), lambda *x: fa.attention(*x, causal=True)),
        "lse only": ((q, k), lambda q, k: attention(q, k, v.detach(), causal=True, alignment="top_left")[1]),
        "bias, sinks, softcap": ((q, k, v, bias, sinks), lambda q, k, v, b, s: attention(
            q, k, v, bias=b, sinks=s, softcap=2.0, causal=True)),
        "window, scale, offset": ((q, k, v), lambda *x: attention(*x, window=(2, 1), scale=-0.4, position_offset=1)),
        "mask with an empty row": ((q, k, v), lambda *x: fa.attention(*x, mask=mask)),
        "lengths": ((q, k, v, sinks), lambda q, k, v, s: attention(q, k, v, lens_k=lens, sinks=s)),
        "packed": (packed, lambda *x: fa.attention(*x, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True)),
        "blhd": ([x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)],
                 lambda *x: attention(*x, layout="blhd", causal=True)),
    }  # fmt: skip


NAMES = list(small_problems(np.random.default_rng(0)))


@pytest.mark.parametrize("name", NAMES)
def test_gradcheck(rng, name):
    operands, function = small_problems(rng)[name]
    assert gradcheck(function, operands)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "blhd"])
def test_gradgradcheck(rng, name):
    operands, function = small_problems(rng)[name]
    assert gradgradcheck(function, operands)


def with_oracle(q, k, v, dout, dlse, dtype, **options):
    """Both passes of PyTorch's operation against float64."""
    leaves = {"q": q, "k": k, "v": v, "bias": options.get("bias"), "sinks": options.get("sinks")}
    leaves = {n: x for n, x in leaves.items() if x is not None and x.requires_grad}
    out, lse = fa.attention(q, k, v, return_lse=True, **options)
    grads = torch.autograd.grad((out, lse), list(leaves.values()), (dout, dlse))
    got = {"out": out, "lse": lse, **{"d" + n: g for n, g in zip(leaves, grads)}}
    plain = lambda x: x.detach().double().cpu().numpy() if isinstance(x, torch.Tensor) and x.dtype != torch.bool else x
    arrays = {n: plain(x) for n, x in dict(q=q, k=k, v=v, dout=dout, dlse=dlse, **options).items()}
    if "mask" in options:
        arrays["mask"] = options["mask"].cpu().numpy()
    q, k, v = (arrays.pop(n) for n in "qkv")
    want, low = oracle.attention(q, k, v, **arrays), oracle.low_of(dtype, q, k, v, **arrays)
    for name in got:
        oracle.compare(plain(got[name]), want[name], low[name], name, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(13, 17), (5, 130), (70, 70), (129, 65)])
def test_against_float64(rng, device, dtype, lengths):
    kind = DTYPES[dtype]
    q, k, v = qkv(rng, device, kind, len_q=lengths[0], len_k=lengths[1], dim_v=24)
    bias = tensor(rng, 1, 4, lengths[0], lengths[1], dtype=kind, device=device)
    sinks = tensor(rng, 4, device=device)
    dout = tensor(rng, 2, 4, lengths[0], 24, dtype=kind, device=device, grad=False)
    dlse = tensor(rng, 2, 4, lengths[0], device=device, grad=False)
    with_oracle(q, k, v, dout, dlse, dtype, causal=True)
    with_oracle(q, k, v, dout, dlse, dtype, bias=bias, sinks=sinks, softcap=3.0, window=(40, 9))


def test_subsets(rng, device):
    """Every subset of operands that need a gradient: the same gradients, and none for the others."""
    q, k, v = qkv(rng, device)
    sinks, bias = tensor(rng, 4, device=device), tensor(rng, 2, 1, 13, 17, device=device)
    operands = [q, k, v, bias, sinks]
    call = lambda q, k, v, b, s: fa.attention(q, k, v, bias=b, sinks=s)
    dout = tensor(rng, 2, 4, 13, 16, device=device, grad=False)
    every = torch.autograd.grad(call(*operands), operands, dout)
    for wanted in itertools.product((False, True), repeat=5):
        if any(wanted):
            some = [x if w else x.detach() for x, w in zip(operands, wanted)]
            chosen = [x for x, w in zip(some, wanted) if w]
            for got, want in zip(torch.autograd.grad(call(*some), chosen, dout), itertools.compress(every, wanted)):
                assert torch.equal(got, want)


def test_cotangents(rng, device):
    """An expanded one, as that of a sum, a transposed one, and none for lse."""
    q, k, v = qkv(rng, device)
    out = fa.attention(q, k, v)
    ones = torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True)
    for got, want in zip(torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True), ones):
        assert torch.equal(got, want)
    other = torch.ones_like(out).transpose(2, 3).contiguous().transpose(2, 3)
    for got, want in zip(torch.autograd.grad(out, (q, k, v), other), ones):
        assert torch.equal(got, want)


def test_layout_of_results(rng, device):
    """out and gradients are dense, in memory in the order of q, k and v."""
    q, k, v = qkv(rng, device, dim_v=24)
    k = k.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    out = fa.attention(q, k, v)
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert out.is_contiguous() and dq.is_contiguous() and dv.is_contiguous() and dk.transpose(1, 2).is_contiguous()
    q = q.detach().transpose(1, 2).contiguous().transpose(1, 2)
    assert fa.attention(q, k, v).transpose(1, 2).is_contiguous()
    out = fa.attention(*(x.transpose(1, 2) for x in (q, k, v)), layout="blhd")
    assert out.is_contiguous() and out.shape == (2, 13, 4, 24)


def test_strided_operands(rng, device):
    """Views of one projection, without a copy: the bits of contiguous ones, and a gradient for the projection."""
    whole = tensor(rng, 2, 19, 3, 4, 16, device=device)
    q, k, v = whole.transpose(1, 3).unbind(2)
    out = fa.attention(q, k, v, causal=True)
    assert torch.equal(out, fa.attention(*(x.contiguous() for x in (q, k, v)), causal=True))
    out.sum().backward()
    assert whole.grad.abs().sum() > 0
    expanded = k[:, :1].expand(-1, 4, -1, -1)
    assert torch.equal(fa.attention(q, expanded, v), fa.attention(q, expanded.contiguous(), v))


def test_autocast(rng, device):
    """q, k, v and bias become the type that autocast asks for, sinks stay f32, f64 stays f64."""
    q, k, v = qkv(rng, device)
    bias, sinks = tensor(rng, 1, 1, 1, 17, device=device), tensor(rng, 4, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        out, lse = fa.attention(q, k, v, bias=bias, sinks=sinks, return_lse=True)
        assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
        if device == "cpu":
            assert fa.attention(q.double(), k.double(), v.double()).dtype == torch.float64
    narrow = [x.bfloat16() for x in (q, k, v, bias)]
    assert torch.equal(out, fa.attention(*narrow[:3], bias=narrow[3], sinks=sinks))
    assert torch.autograd.grad(out.sum(), q)[0].dtype == torch.float32


def test_tracers(rng):
    """Tensors without data, export with a symbolic length, and a profiler that sees the operation."""
    empty = torch.empty(2, 4, 9, 8, device="meta", requires_grad=True)
    out, lse = fa.attention(empty, empty, empty, return_lse=True)
    assert out.shape == empty.shape and lse.shape == (2, 4, 9) and out.device.type == "meta"
    q, k, v = (x.detach() for x in qkv(rng))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fa.attention(q, k, v)
    assert "flashback::forward" in {event.key for event in profile.key_averages()}
    if hasattr(torch, "export"):

        class Layer(torch.nn.Module):
            def forward(self, q):
                return fa.attention(q, q, q, causal=True)

        length = torch.export.Dim("length", min=2, max=4096)
        layer = torch.export.export(Layer(), (q,), dynamic_shapes=({2: length},)).module()
        longer = tensor(rng, 2, 4, 40, 16, grad=False)
        assert torch.equal(layer(longer), fa.attention(longer, longer, longer, causal=True))


def test_sinks_of_another_type(rng, device):
    """A model in bf16 has its sinks in bf16; the gradient comes back in that type."""
    q, k, v = qkv(rng, device, torch.bfloat16)
    sinks = tensor(rng, 4, dtype=torch.bfloat16, device=device)
    out = fa.attention(q, k, v, sinks=sinks)
    assert torch.equal(out, fa.attention(q, k, v, sinks=sinks.float()))
    assert torch.autograd.grad(out.sum(), sinks)[0].dtype == torch.bfloat16


def test_deterministic(rng, device):
    """torch.use_deterministic_algorithms asks for a plan that says so; an argument wins."""
    q, k, v = qkv(rng, device)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        assert "deterministic" in fa.explain(q, k, v)
        assert "deterministic" not in fa.explain(q, k, v, deterministic=False)
        torch.use_deterministic_algorithms(False)
        assert "deterministic" not in fa.explain(q, k, v)
    finally:
        torch.use_deterministic_algorithms(before)


def test_threads(rng):
    """torch.set_num_threads bounds the threads; bits do not change."""
    q, k, v = qkv(rng, len_q=200, len_k=200)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out = fa.attention(q, k, v)
            found.append([out, *torch.autograd.grad(out.sum(), (q, k, v))])
            if threads == 1:
                assert "threads: forward 1, backward 1" in fa.explain(q, k, v), fa.explain(q, k, v)
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other))


def test_vjp_of_tensors(rng, device):
    """attention_vjp on tensors is what autograd computes."""
    q, k, v = (x.detach() for x in qkv(rng, device))
    out, lse = fa.attention(q, k, v, causal=True, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    found = fa.attention_vjp(dout, q, k, v, out, lse, dlse=dlse, causal=True)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad(fa.attention(*leaves, causal=True, return_lse=True), leaves, (dout, dlse))
    assert found.dbias is None and all(torch.equal(a, b) for a, b in zip(found, want))


def test_numbers_agree_with_numpy(rng):
    q, k, v = (x.detach() for x in qkv(rng))
    assert np.array_equal(fa.attention(q, k, v).numpy(), fa.attention(q.numpy(), k.numpy(), v.numpy()))


def operations(rng, device, dtype=torch.float32):
    """Arguments of both operations, in their schema's order: contiguous, views, grouped heads, all options."""
    numbers = (-1, 0, False, 0, None, 0.0, 0, 0, 0, 0, False, "auto")
    q, k, v = qkv(rng, device, dtype)
    yield "plain", (q, k, v, *[None] * 8, *numbers)
    views = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    yield "views", (*views, *[None] * 8, *numbers)
    yield "some need gradients", (q, k.detach(), v, *[None] * 8, *numbers)
    bias, sinks = tensor(rng, 1, 4, 1, 17, dtype=dtype, device=device), tensor(rng, 4, device=device)
    mask = torch.tensor(rng.random((2, 1, 1, 17)) < 0.8, device=device)
    lens = torch.tensor([9, 17], dtype=torch.int32, device=device)
    yield "options", (q, k, v, bias, mask, None, sinks, None, None, None, lens, 9, 4, True, 1, 0.3, 2.0, 0, 0, 0, 0,
                      True, "fused")  # fmt: skip
    cu = torch.tensor([0, 4, 13], dtype=torch.int32, device=device)
    packed = [x.detach()[0].transpose(0, 1)[:13].contiguous().requires_grad_() for x in (q, k, v)]
    yield "packed", (*packed, *[None] * 4, cu, cu, None, None, -1, 0, False, 0, None, 0.0, 0, 0, 13, 13, False, "auto")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason="this PyTorch has no torch.library.opcheck")
@pytest.mark.parametrize("name", ["plain", "views", "options", "some need gradients", "packed"])
def test_opcheck(rng, device, name):
    dtype = torch.bfloat16 if name == "views" else torch.float32
    arguments = dict(operations(rng, device, dtype))[name]
    torch.library.opcheck(torch.ops.flashback.forward.default, arguments)
    with torch.no_grad():
        out, lse = torch.ops.flashback.forward(*arguments)
    wanted = [isinstance(arguments[n], torch.Tensor) for n in (0, 1, 2, 3, 6)]
    cotangents = torch.randn_like(out), torch.randn_like(lse)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    if name == "packed":
        tests = tests[:3]  # second derivatives of packed batches read the boundaries, which no trace can
    torch.library.opcheck(
        torch.ops.flashback.backward.default, (*cotangents, *arguments, out, lse, wanted), test_utils=tests
    )


def test_rows_behind_the_last_boundary(rng, device):
    """Zero, and without a gradient."""
    q, k, v = (tensor(rng, 12, h, 16, device=device) for h in (4, 2, 2))
    cu = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
    out, lse = fa.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, return_lse=True)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all((x[9:] == 0).all() and (x[:9] != 0).any() for x in (out, *grads)) and (lse[:, 9:] == -torch.inf).all()


def test_vmap_and_grad(rng):
    """torch.func: a loop over the mapped dimension, also under grad and with shared operands."""
    q = tensor(rng, 3, 2, 4, 9, 8, grad=False)
    k = tensor(rng, 2, 2, 9, 8, grad=False)
    call = lambda q, k: fa.attention(q, k, k, causal=True)
    mapped = torch.func.vmap(call, in_dims=(0, None))(q, k)
    assert torch.equal(mapped, torch.stack([call(x, k) for x in q]))
    loss = lambda q, k: call(q, k).square().sum()
    dq, dk = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(0, None))(q, k)
    for n in range(3):
        x, y = q[n].clone().requires_grad_(), k.clone().requires_grad_()
        want = torch.autograd.grad(loss(x, y), (x, y))
        torch.testing.assert_close((dq[n], dk[n]), want, rtol=1e-5, atol=1e-6)
    _, pull = torch.func.vjp(call, q[0], k)
    x = q[0].clone().requires_grad_()
    want = torch.autograd.grad(call(x, k).sum(), x)[0]
    assert torch.equal(pull(torch.ones(2, 4, 9, 8))[0], want)
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q, k).sum())(q[0])


def test_checkpoint(rng):
    """Gradient checkpointing runs the forward again."""
    from torch.utils.checkpoint import checkpoint

    q, k, v = qkv(rng)
    want = torch.autograd.grad(fa.attention(q, k, v).square().sum(), (q, k, v))
    got = torch.autograd.grad(checkpoint(fa.attention, q, k, v, use_reentrant=False).square().sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_large_logits_and_hidden_nan(rng, device):
    """NaN behind a length or a mask changes no bit, and gets a gradient of exactly 0."""
    q, k, v = (x.detach() for x in qkv(rng, device))
    lens = torch.tensor([4, 17], dtype=torch.int32, device=device)
    bad_k, bad_v = k.clone(), v.clone()
    bad_k[0, :, 4:], bad_v[0, :, 4:] = float("nan"), float("inf")
    found = []
    for x, y in ((k, v), (bad_k, bad_v)):
        leaves = [t.clone().requires_grad_() for t in (q, x, y)]
        out = fa.attention(*leaves, lens_k=lens)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*found)) and (found[1][2][0, :, 4:] == 0).all()
