"""Arrays by DLPack: in without a copy, versioned and not; out to the caller's library, or as a tensor that any
takes."""

import gc

import conftest
import pytest

np = pytest.importorskip("numpy", reason="needs the package numpy")
import flashback_attention as fa  # noqa: E402
from flashback_attention import _arrays  # noqa: E402


class Foreign:
    """An array that shows nothing but DLPack, as a library that nobody knows."""

    def __init__(self, array, versions=True, device=(1, 0)):
        self.array, self.versions, self.device = array, versions, device

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **keywords):
        if keywords and not self.versions:
            raise TypeError("unexpected keyword argument")
        return self.array.__dlpack__(**keywords)


@pytest.mark.parametrize("versions", [True, False])
def test_both_passes(rng, versions):
    q, k, v, dout = (rng.standard_normal((2, 4, 9, 16)).astype(np.float32) for _ in range(4))
    want, want_lse = fa.attention(q, k, v, causal=True, return_lse=True)
    foreign = [Foreign(x, versions) for x in (q, k, v)]
    out, lse = fa.attention(*foreign, causal=True, return_lse=True)
    assert isinstance(out, fa.Tensor) and out.shape == (2, 4, 9, 16) and out.dtype == "f32"
    assert np.array_equal(np.from_dlpack(out), want) and np.array_equal(np.from_dlpack(lse), want_lse)
    grads = fa.attention_vjp(Foreign(dout, versions), *foreign, out, lse, causal=True)
    for got, right in zip(grads[:3], fa.attention_vjp(dout, q, k, v, want, want_lse, causal=True)):
        assert np.array_equal(np.from_dlpack(got), right)


def test_strides_and_layout(rng):
    """Views that are not contiguous, in the other layout."""
    whole = rng.standard_normal((2, 9, 3, 4, 16)).astype(np.float32)
    views = [whole[:, :, n] for n in range(3)]
    out = fa.attention(*(Foreign(x) for x in views), layout="blhd")
    assert np.array_equal(np.from_dlpack(out), fa.attention(*views, layout="blhd"))


def test_results_outlive_everything(rng):
    """Memory of a result lives as long as any consumer of it, and no longer."""
    q = rng.standard_normal((1, 2, 64, 32)).astype(np.float32)
    want = fa.attention(q, q, q)
    before = len(_arrays._exported)
    views = [np.from_dlpack(fa.attention(Foreign(q), Foreign(q), Foreign(q))) for _ in range(5)]
    gc.collect()
    for _ in range(50):
        fa.attention(Foreign(q), Foreign(q), Foreign(q))
    assert all(np.array_equal(x, want) for x in views) and len(_arrays._exported) == before + 5
    out = fa.attention(Foreign(q), Foreign(q), Foreign(q))
    capsule = out.__dlpack__()
    assert len(_arrays._exported) == before + 6
    del views, capsule
    gc.collect()
    assert len(_arrays._exported) == before
    assert np.array_equal(np.from_dlpack(out), want), "a tensor may be given more than once"


def test_refusals(rng):
    q = rng.standard_normal((1, 2, 4, 8)).astype(np.float32)
    with pytest.raises(TypeError, match="lies on DLPack device .2, 0.; .*torch.from_dlpack"):
        fa.attention(Foreign(q, device=(2, 0)), q, q)
    with pytest.raises(TypeError, match="k is of type str, expected a NumPy array"):
        fa.attention(q, "k", q)
    with pytest.raises(BufferError):
        fa.attention(Foreign(q), q, q).__dlpack__(copy=True)


def test_mlx(rng):
    """Results come back as arrays of the library that the inputs are from."""
    mx = conftest.need("mlx.core", "this test") if conftest.importlib.util.find_spec("mlx") else pytest.skip(
        "this test needs the package mlx[cpu]")  # fmt: skip
    q = rng.standard_normal((1, 2, 9, 16)).astype(np.float32)
    out = fa.attention(mx.array(q), mx.array(q), mx.array(q))
    assert isinstance(out, mx.array) and np.array_equal(np.array(out), fa.attention(q, q, q))


def test_torch_takes_results(rng):
    torch = conftest.need("torch", "this test")
    q = rng.standard_normal((1, 2, 9, 16)).astype(np.float32)
    out = torch.from_dlpack(fa.attention(Foreign(q), Foreign(q), Foreign(q)))
    assert np.array_equal(out.numpy(), fa.attention(q, q, q))
