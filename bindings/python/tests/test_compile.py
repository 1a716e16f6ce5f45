"""torch.compile: whole graphs with symbolic lengths, traced once for all of them, and the results of eager mode."""

import pytest

torch = pytest.importorskip("torch", reason="needs the package torch")
import flashback_attention as fa  # noqa: E402

if not hasattr(torch.library, "register_fake"):
    pytest.skip("this PyTorch has no torch.library.register_fake", allow_module_level=True)


def leaves(rng, length, device="cpu", layout="bhld"):
    shape = (2, 4, length, 8) if layout == "bhld" else (2, length, 4, 8)
    make = lambda: torch.tensor(rng.standard_normal(shape), dtype=torch.float32, device=device).requires_grad_()
    return make(), make(), make()


def compiled(function):
    """The function as one graph; what was traced before is forgotten."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")


OPTIONS = {
    "causal": {"causal": True},
    "window, softcap": {"window": (5, 0), "softcap": 2.0, "scale": 0.3},
    "blhd": {"layout": "blhd", "causal": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_one_graph_for_all_lengths(rng, device, name):
    options = OPTIONS[name]
    function = lambda q, k, v: fa.attention(q, k, v, **options) * 2
    fast = compiled(function)
    for length in (16, 24, 33, 40):
        operands = leaves(rng, length, device, options.get("layout", "bhld"))
        want = function(*operands)  # first, so that no module is imported in a trace
        got = fast(*operands)
        assert torch.equal(got, want) and got.stride() == want.stride()
        for a, b in zip(*(torch.autograd.grad(x.square().sum(), operands) for x in (got, want))):
            assert torch.equal(a, b) and a.stride() == b.stride()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "another graph for another length"


def test_lse_and_operands(rng):
    """Gradients through LSE, bias, sinks and a mask in a graph."""
    q, k, v = leaves(rng, 12)
    bias = torch.tensor(rng.standard_normal((1, 4, 1, 12)), dtype=torch.float32, requires_grad=True)
    sinks = torch.tensor(rng.standard_normal(4), dtype=torch.float32, requires_grad=True)
    mask = torch.tensor(rng.random((2, 1, 12, 12)) < 0.8)

    def function(q, k, v, bias, sinks):
        out, lse = fa.attention(q, k, v, bias=bias, sinks=sinks, mask=mask, return_lse=True)
        return out.square().sum() + lse.sum()

    fast = compiled(function)
    operands = (q, k, v, bias, sinks)
    for a, b in zip(torch.autograd.grad(fast(*operands), operands), torch.autograd.grad(function(*operands), operands)):
        assert torch.equal(a, b)


def test_packed(rng):
    """Without max_seqlen a graph takes the total as the bound; the numbers are the same."""
    q = torch.tensor(rng.standard_normal((11, 4, 8)), dtype=torch.float32)
    cu = torch.tensor([0, 4, 11], dtype=torch.int32)
    function = lambda q: fa.attention(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
    fast = compiled(function)
    torch.testing.assert_close(fast(q), function(q), rtol=1e-5, atol=1e-6)


def test_autocast(rng, device):
    q, k, v = leaves(rng, 12, device)

    def function(q, k, v):
        with torch.autocast(device, dtype=torch.bfloat16):
            return fa.attention(q, k, v)

    fast = compiled(function)
    got = fast(q, k, v)
    assert got.dtype == torch.bfloat16 and torch.equal(got, function(q, k, v))


def test_wrong_shapes_are_refused_while_tracing(rng):
    fast = compiled(lambda q: fa.attention(q, q, q))
    with pytest.raises(Exception, match="q has shape .*expected 4 dimensions"):
        fast(torch.randn(4, 9, 8))


@pytest.mark.long
def test_inductor(rng):
    """The default backend, which needs a C++ compiler."""
    q, k, v = leaves(rng, 24)
    torch._dynamo.reset()
    fast = torch.compile(lambda *x: fa.attention(*x, causal=True).relu(), fullgraph=True, dynamic=True)
    got = torch.autograd.grad(fast(q, k, v).sum(), (q, k, v))
    want = torch.autograd.grad(fa.attention(q, k, v, causal=True).relu().sum(), (q, k, v))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
