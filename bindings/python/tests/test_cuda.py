"""What only a GPU has: streams, graphs, memory, devices that differ, and training with scaled losses.

Everything here is marked cuda: `pytest bindings/python/tests -m cuda`, with FLASHBACK_LIB or a build folder.
"""

import pytest

torch = pytest.importorskip("torch", reason="needs the package torch")
import flashback_attention as fa  # noqa: E402

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and PyTorch sees none"),
]


def operands(rng, length=256, dtype=torch.bfloat16, heads=4, dim=64):
    make = lambda h: torch.tensor(rng.standard_normal((2, h, length, dim)), dtype=dtype, device="cuda").requires_grad_()
    return make(heads), make(heads // 2), make(heads // 2)


def both_passes(q, k, v, **options):
    out = fa.attention(q, k, v, causal=True, **options)
    return [out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))]


def test_plan(rng):
    words = fa.explain(*operands(rng), causal=True)
    assert "device: cuda 0" in words and "route: fused" in words, words


def test_current_stream(rng):
    """Work is queued on PyTorch's current stream, behind what fills the inputs there."""
    q, k, v = operands(rng, 512)
    want = both_passes(q, k, v)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = [torch.full_like(x, float("nan")) for x in (q, k, v)]
        torch.cuda._sleep(200_000_000)  # what ran ahead of this would read NaN
        for x, y in zip(late, (q, k, v)):
            x.detach().copy_(y.detach())
        got = both_passes(*(x.detach().requires_grad_() for x in late))
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_nothing_waits(rng):
    """Neither pass waits for the GPU."""
    q, k, v = operands(rng)
    both_passes(q, k, v)
    torch.cuda.set_sync_debug_mode("error")
    try:
        both_passes(q, k, v)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_graph(rng):
    """Captured once, replayed on other numbers: the bits of eager calls."""
    q, k, v = operands(rng)
    for _ in range(2):
        both_passes(q, k, v)  # plans are made ahead: a capture must not compile
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both_passes(q, k, v)
    for _ in range(3):
        with torch.no_grad():
            for x in (q, k, v):
                x.copy_(torch.tensor(rng.standard_normal(x.shape), dtype=x.dtype))
        for x in captured:
            x.detach().fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(captured, both_passes(q, k, v)))


def test_memory_is_linear(rng):
    """Both passes over 16384 tokens take a small multiple of their inputs; the scores would take 2 GiB a head."""
    q, k, v = operands(rng, 16384, heads=4)
    both_passes(*(x[:, :, :64].detach().requires_grad_() for x in (q, k, v)))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    both_passes(q, k, v)
    grown = torch.cuda.max_memory_allocated() - before
    assert grown < 16 * q.numel() * q.element_size(), f"{grown / 2**20:.0f} MiB"


def test_devices_that_differ(rng):
    q, k, v = operands(rng, 16)
    with pytest.raises(ValueError, match="k lies on .* and q on"):
        fa.attention(q, k.cpu(), v)
    with pytest.raises(ValueError, match="mask lies on"):
        fa.attention(q, k, v, mask=torch.ones(1, 1, 16, 16, dtype=torch.bool))


def test_f64_is_refused(rng):
    q, k, v = operands(rng, 16, dtype=torch.float64)
    with pytest.raises(fa.Unsupported):
        fa.attention(q, k, v)
    assert not fa.supported(q, k, v)[0]


def test_agrees_with_the_cpu(rng):
    """f32 on a GPU keeps the accuracy of f32."""
    q, k, v = operands(rng, 130, dtype=torch.float32, dim=40)
    other = [x.detach().cpu().requires_grad_() for x in (q, k, v)]
    for a, b in zip(both_passes(q, k, v), both_passes(*other)):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-4)


def test_scaled_loss(rng):
    """autocast to f16 with a GradScaler, as training in f16 has it."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 3 * 64).cuda()
    optimizer = torch.optim.SGD(linear.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cuda")
    x = torch.tensor(rng.standard_normal((2, 128, 64)), dtype=torch.float32, device="cuda")
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            q, k, v = linear(x).view(2, 128, 3, 4, 16).unbind(2)
            out = fa.attention(q, k, v, causal=True, layout="blhd")
            assert out.dtype == torch.float16
            loss = (out.flatten(2).float() - x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_other_libraries_by_dlpack(rng):
    """torch.from_dlpack takes arrays on a GPU without a copy; other arrays there are refused with that hint."""
    q, k, v = (x.detach() for x in operands(rng, 32))

    class Foreign:
        __dlpack__, __dlpack_device__ = q.__dlpack__, q.__dlpack_device__

    with pytest.raises(TypeError, match="torch.from_dlpack"):
        fa.attention(Foreign(), Foreign(), Foreign())
    assert torch.equal(fa.attention(torch.from_dlpack(q), k, v), fa.attention(q, k, v))
