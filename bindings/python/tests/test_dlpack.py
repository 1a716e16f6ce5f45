"""Arrays by DLPack: in without a copy, versioned and not; out to the caller's library, or as a tensor that any
takes."""

import gc
import subprocess
import sys

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


def test_packed(rng):
    """Rows behind the last boundary, in memory of the library."""
    q = rng.standard_normal((7, 2, 16)).astype(np.float32)
    cu = np.array([0, 2, 5], np.int32)
    want, want_lse = fa.attention(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, return_lse=True)
    x = Foreign(q)
    out, lse = fa.attention(x, x, x, cu_seqlens_q=Foreign(cu), cu_seqlens_k=Foreign(cu), return_lse=True)
    assert np.array_equal(np.from_dlpack(out), want) and np.array_equal(np.from_dlpack(lse), want_lse)
    assert (want[5:] == 0).all() and (want_lse[:, 5:] == -np.inf).all()


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


def test_results_at_exit():
    """Results that live until the interpreter ends do no harm."""
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
import flashback_attention as fa

class Foreign:
    def __init__(self, x):
        self.__dlpack__, self.__dlpack_device__ = x.__dlpack__, x.__dlpack_device__

q = Foreign(np.ones((1, 2, 300, 16), np.float32))
kept = [np.from_dlpack(fa.attention(q, q, q)) for _ in range(3)]
sys.kept, unused = kept, fa.attention(q, q, q).__dlpack__()
print(kept[0].sum())
"""
    place = str(conftest.ROOT / "bindings/python")
    done = subprocess.run([sys.executable, "-c", code, place], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "9600.0\n", "")


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
