"""replace_sdpa: which calls go where, that results are PyTorch's, and what the report says."""

import pytest

torch = pytest.importorskip("torch", reason="needs the package torch")
np = pytest.importorskip("numpy", reason="needs the package numpy")
import flashback_attention as fa  # noqa: E402

F = torch.nn.functional
sdpa = F.scaled_dot_product_attention


def tensors(rng, *shapes, dtype=torch.float32, device="cpu"):
    return [torch.tensor(rng.standard_normal(s), dtype=dtype, device=device).requires_grad_() for s in shapes]


Q, K = (2, 4, 9, 16), (2, 4, 12, 16)


def taken(rng, device):
    """Calls that go to flashback: name: (q, k, v, keywords)."""
    q, k, v = tensors(rng, Q, K, K, device=device)
    grouped = tensors(rng, (2, 2, 12, 16), (2, 2, 12, 16), device=device)
    keep = torch.tensor(rng.random((2, 1, 9, 12)) < 0.7, device=device)
    keep[..., 0] = True
    added = tensors(rng, (9, 12), device=device)[0]
    return {
        "plain": (q, k, v, {}),
        "causal is top left": (q, k, v, {"is_causal": True}),
        "scale": (q, k, v, {"scale": 0.1}),
        "grouped": (q, *grouped, {"enable_gqa": True}),
        "boolean mask": (q, k, v, {"attn_mask": keep}),
        "added mask of two dimensions": (q, k, v, {"attn_mask": added}),
        "wide values": (q, k, tensors(rng, (2, 4, 12, 24), device=device)[0], {}),
    }


@pytest.mark.parametrize("name", list(taken(np.random.default_rng(0), "cpu")))
def test_taken(rng, device, name):
    q, k, v, options = taken(rng, device)[name]
    leaves = [x for x in (q, k, v, options.get("attn_mask")) if x is not None and x.requires_grad]
    want = sdpa(q, k, v, **options)
    with fa.replace_sdpa() as report:
        got = F.scaled_dot_product_attention(q, k, v, **options)
    assert (report.routed, report.left_alone) == (1, {})
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    cotangent = torch.randn_like(want)
    for a, b in zip(*(torch.autograd.grad(x, leaves, cotangent) for x in (got, want))):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_left_alone(rng):
    q, k, v = tensors(rng, Q, Q, Q)
    mask = torch.ones(9, 9, dtype=torch.bool)
    calls = {
        "dropout": ((q, k, v), {"dropout_p": 0.5}),
        "not [batch, heads, length, head_dim]": ((q[0], k[0], v[0]), {}),
        "shapes that broadcast or differ": ((q, k[:1], v[:1]), {}),
        "a mask of torch.float64 for queries of torch.float32": ((q, k, v), {"attn_mask": torch.zeros(9, 9).double()}),
        "a last dimension that is not contiguous": ((q.transpose(2, 3), k.transpose(2, 3), v.transpose(2, 3)), {}),
        "desc.head_dim is 600; every value from 0 to 576 is supported, larger ones are not": (
            (torch.randn(1, 1, 2, 600),) * 3, {}),
        "attn_mask together with is_causal": ((q, k, v), {"attn_mask": mask, "is_causal": True}),
    }  # fmt: skip
    with fa.replace_sdpa() as report:
        for operands, options in calls.values():
            try:
                F.scaled_dot_product_attention(*operands, **options)
            except (RuntimeError, ValueError):
                pass  # PyTorch's own refusal
    assert report.routed == 0 and dict(report.left_alone) == dict.fromkeys(calls, 1)
    assert "1 did not: dropout" in str(report)


def test_modules_and_nesting(rng):
    """What calls the function by its module is taken; every context counts for itself, and the last one puts it
    back."""
    layer = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    x = tensors(rng, (2, 5, 16))[0]
    want = layer(x, x, x, need_weights=False)[0]
    with fa.replace_sdpa() as outer:
        got = layer(x, x, x, need_weights=False)[0]
        with fa.replace_sdpa() as inner:
            layer(x, x, x, need_weights=False)
        layer(x, x, x, need_weights=False)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert (outer.routed, inner.routed) == (3, 1) and F.scaled_dot_product_attention is sdpa
    with pytest.raises(KeyError), fa.replace_sdpa():
        raise KeyError
    assert F.scaled_dot_product_attention is sdpa


def test_compiled(rng):
    q, k, v = tensors(rng, Q, K, K)
    with fa.replace_sdpa() as report:
        torch._dynamo.reset()
        fast = torch.compile(lambda *x: F.scaled_dot_product_attention(*x), fullgraph=True, backend="aot_eager")
        got = fast(q, k, v)
    assert report.routed == 1
    torch.testing.assert_close(got, sdpa(q, k, v), rtol=1e-4, atol=1e-5)
