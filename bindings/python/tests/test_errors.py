"""What is wrong is refused with a sentence that names the argument, what came, and what was expected."""

import pytest

np = pytest.importorskip("numpy", reason="needs the package numpy")
import flashback_attention as fa  # noqa: E402

ones = lambda *shape, dtype=np.float32: np.ones(shape, dtype)
Q, K = ones(2, 4, 5, 8), ones(2, 2, 6, 8)
CU = np.array([0, 2, 5], np.int32)
PACKED = ones(5, 4, 8)

# error, part of the sentence, the call
CASES = {
    "rank": (ValueError, r"q has shape \[4, 5, 8\], expected 4 dimensions", lambda: fa.attention(Q[0], K, K)),
    "rank, blhd": (ValueError, r"expected 4 dimensions: \[batch, length, heads", lambda: fa.attention(
        Q[0], K, K, layout="blhd")),
    "rank, packed": (ValueError, r"q has shape .* \[total, heads, head_dim\]", lambda: fa.attention(
        Q, K, K, cu_seqlens_q=CU, cu_seqlens_k=CU)),
    "batch": (ValueError, "k has batch 1 and q has 2", lambda: fa.attention(Q, K[:1], K[:1])),
    "heads": (ValueError, "heads_q is 4 and heads_kv is 3", lambda: fa.attention(
        Q, *(ones(2, 3, 6, 8),) * 2)),
    "lengths": (ValueError, "v has length 5 and k has 6", lambda: fa.attention(Q, K, K[:, :, :5])),
    "head_dim": (ValueError, "k has head_dim 4 and q has 8", lambda: fa.attention(Q, K[..., :4], K)),
    "large head_dim": (fa.Unsupported, "head_dim is 600; every value from 0 to 576", lambda: fa.attention(
        *(ones(1, 1, 1, 600),) * 3)),
    "integers": (TypeError, "q is <i8, expected", lambda: fa.attention(Q.astype(np.int64), K, K)),
    "byte order": (TypeError, "q is >f4, expected", lambda: fa.attention(Q.astype(">f4"), K, K)),
    "boolean q": (ValueError, "q has DLPack type", lambda: fa.attention(Q.astype(bool), K, K)),
    "mixed types": (ValueError, "k is f64 and q is f32", lambda: fa.attention(Q, K.astype(np.float64), K)),
    "last stride": (ValueError, "q has stride 2 in its last dimension", lambda: fa.attention(
        ones(2, 4, 5, 16)[..., ::2], K, K)),
    "negative stride": (ValueError, "negative strides are not supported", lambda: fa.attention(Q[:, :, ::-1], K, K)),
    "no array": (TypeError, "v is of type list, expected a NumPy array", lambda: fa.attention(Q, K, [1])),
    "None": (TypeError, "v is of type NoneType", lambda: fa.attention(Q, K, None)),
    "NaN scale": (ValueError, "scale is NaN, expected a finite number; None asks", lambda: fa.attention(
        Q, K, K, scale=float("nan"))),
    "infinite scale": (ValueError, "scale is inf, expected", lambda: fa.attention(Q, K, K, scale=float("inf"))),
    "scale of a wrong type": (TypeError, "scale is '1'", lambda: fa.attention(Q, K, K, scale="1")),
    "negative softcap": (ValueError, "softcap is -1, expected 0", lambda: fa.attention(Q, K, K, softcap=-1)),
    "window": (TypeError, r"window is 5, expected a pair .* \(W - 1, 0\)", lambda: fa.attention(Q, K, K, window=5)),
    "negative window": (ValueError, "window's left is -3", lambda: fa.attention(Q, K, K, window=(-3, 0))),
    "window of a wrong type": (TypeError, "window's right is 1.5", lambda: fa.attention(Q, K, K, window=(1, 1.5))),
    "alignment": (ValueError, "alignment is 'left', expected one of", lambda: fa.attention(Q, K, K, alignment="left")),
    "route": (ValueError, "route is 'fast', expected one of: auto", lambda: fa.attention(Q, K, K, route="fast")),
    "route that cannot": (fa.Unsupported, "route vector.*takes at most 8", lambda: fa.attention(
        *(ones(1, 1, 9, 8),) * 3, route="vector")),
    "layout": (ValueError, "layout is 'lbhd', expected", lambda: fa.attention(Q, K, K, layout="lbhd")),
    "float mask": (TypeError, "mask is f32, expected bool; True keeps .* are a bias", lambda: fa.attention(
        Q, K, K, mask=ones(2, 1, 5, 6))),
    "integer mask": (TypeError, "mask is .u1, expected", lambda: fa.attention(
        Q, K, K, mask=ones(2, 1, 5, 6, dtype=np.uint8))),
    "mask rank": (ValueError, r"mask has shape \[2, 6\], expected 4 dimensions", lambda: fa.attention(
        Q, K, K, mask=ones(2, 6, dtype=bool))),
    "mask shape": (ValueError, r"mask_shape is \[2,1,6,5\], expected \[2\|1,4\|1,5\|1,6\|1\]", lambda: fa.attention(
        Q, K, K, mask=ones(2, 1, 6, 5, dtype=bool))),
    "bool bias": (TypeError, "bias is bool, expected f32", lambda: fa.attention(
        Q, K, K, bias=ones(2, 1, 5, 6, dtype=bool))),
    "bias of another type": (TypeError, "bias is f64, expected f32", lambda: fa.attention(
        Q, K, K, bias=ones(2, 1, 5, 6, dtype=np.float64))),
    "bias shape": (ValueError, r"bias_shape is \[1,3,5,6\]", lambda: fa.attention(Q, K, K, bias=ones(1, 3, 5, 6))),
    "block_mask": (TypeError, "block_mask is of type ndarray, expected BlockMask", lambda: fa.attention(
        Q, K, K, block_mask=ones(1, 1, 1, 1, dtype=bool))),
    "block size": (ValueError, "block_q is 8, expected a positive multiple of 16", lambda: fa.attention(
        Q, K, K, block_mask=fa.BlockMask(ones(1, 1, 1, 1, dtype=bool), 8, 16))),
    "blocks": (ValueError, r"block_mask has shape \[1, 1, 2, 1\], expected \[1, 1, 1, 1\]", lambda: fa.attention(
        Q, K, K, block_mask=fa.BlockMask(ones(1, 1, 2, 1, dtype=bool), 16, 16))),
    "sinks shape": (ValueError, r"sinks has shape \[3\], expected \[4\]", lambda: fa.attention(Q, K, K, sinks=ones(3))),
    "sinks type": (TypeError, "sinks is f64, expected f32", lambda: fa.attention(
        Q, K, K, sinks=ones(4, dtype=np.float64))),
    "lengths type": (TypeError, "lens_k is <i8, expected", lambda: fa.attention(Q, K, K, lens_k=np.array([1, 2]))),
    "lengths shape": (ValueError, r"lens_k has shape \[3\], expected \[2\]", lambda: fa.attention(
        Q, K, K, lens_k=np.array([1, 2, 3], np.int32))),
    "lengths value": (ValueError, "lens_k.1. is 7, expected 0 to 6", lambda: fa.attention(
        Q, K, K, lens_k=np.array([1, 7], np.int32))),
    "one cu": (ValueError, "cu_seqlens_k is None, but the other one is given", lambda: fa.attention(
        PACKED, PACKED, PACKED, cu_seqlens_q=CU)),
    "cu of another size": (ValueError, r"cu_seqlens_k has shape \[2\], expected \[3\]", lambda: fa.attention(
        PACKED, PACKED, PACKED, cu_seqlens_q=CU, cu_seqlens_k=CU[:2])),
    "cu from 1": (ValueError, r"cu_q\[0\] is 1, expected 0", lambda: fa.attention(
        PACKED, PACKED, PACKED, cu_seqlens_q=CU + np.int32(1), cu_seqlens_k=CU)),
    "cu too long": (ValueError, "ends at 9, but desc.total_q is 5", lambda: fa.attention(
        PACKED, PACKED, PACKED, cu_seqlens_q=np.array([0, 2, 9], np.int32), cu_seqlens_k=CU)),
    "cu that descends": (ValueError, "expected ascending", lambda: fa.attention(
        PACKED, PACKED, PACKED, cu_seqlens_q=np.array([0, 6, 5], np.int32), cu_seqlens_k=CU)),
    "max_seqlen too short": (ValueError, "gives sequence 0 2 rows, but desc.len_q .* is 1", lambda: fa.attention(
        PACKED, PACKED, PACKED, cu_seqlens_q=CU, cu_seqlens_k=CU, max_seqlen_q=1)),
    "offset": (TypeError, "position_offset is 0.5", lambda: fa.attention(Q, K, K, position_offset=0.5)),
    "huge offset": (ValueError, "position_offset is", lambda: fa.attention(Q, K, K, position_offset=2**70)),
    "unknown keyword": (TypeError, "unexpected keyword", lambda: fa.attention(Q, K, K, dropout=0.1)),
    "dout shape": (ValueError, r"dout is f32 \[2, 4, 5, 7\], expected f32 \[2, 4, 5, 8\]", lambda: fa.attention_vjp(
        ones(2, 4, 5, 7), Q, K, K, *fa.attention(Q, K, K, return_lse=True))),
    "lse type": (ValueError, "lse is f64 .* expected f32", lambda: fa.attention_vjp(
        Q, Q, K, K, Q, ones(2, 4, 5, dtype=np.float64))),
    "out strides": (ValueError, "out has strides .*, expected", lambda: fa.attention_vjp(
        Q, Q, K, K, ones(2, 5, 4, 8).transpose(0, 2, 1, 3), ones(2, 4, 5))),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_sentence(name):
    error, sentence, call = CASES[name]
    with pytest.raises(error, match=sentence):
        call()


def test_supported_says_the_same():
    assert fa.supported(Q, K, K, causal=True) == (True, "")
    fits, reason = fa.supported(Q, K, K[..., :5], mask=ones(2, 1, 5, 6))
    assert not fits and "mask is f32, expected bool" in reason
    fits, reason = fa.supported(*(ones(1, 1, 1, 600),) * 3)
    assert not fits and "head_dim is 600" in reason


def test_environment(monkeypatch):
    """An unknown value is an error of the first call that makes a plan."""
    monkeypatch.setenv("FLASHBACK_ROUTE", "fastest")
    fa.clear_plans()
    with pytest.raises(ValueError, match="FLASHBACK_ROUTE is 'fastest', expected one of"):
        fa.attention(Q, K, K)
    monkeypatch.setenv("FLASHBACK_ROUTE", "unfused")
    assert "route: unfused, by FLASHBACK_ROUTE" in fa.explain(Q, K, K)
    fa.clear_plans()


@pytest.mark.parametrize("name", ["rank", "batch", "mask", "type", "device", "mixed", "strides", "NaN scale"])
def test_torch(name):
    torch = pytest.importorskip("torch", reason="needs the package torch")
    q, k = torch.tensor(Q), torch.tensor(K)
    cases = {
        "rank": (ValueError, "q has shape .*expected 4 dimensions", lambda: fa.attention(q[0], k, k)),
        "batch": (ValueError, "k has batch 1 and q has 2", lambda: fa.attention(q, k[:1], k[:1])),
        "mask": (TypeError, "mask is f32, expected bool", lambda: fa.attention(q, k, k, mask=torch.ones(2, 1, 5, 6))),
        "type": (TypeError, "q is torch.int64, expected one of", lambda: fa.attention(q.long(), k, k)),
        "device": (ValueError, "k lies on meta, expected cpu or cuda", lambda: fa.attention(q, k.to("meta"), k)),
        "mixed": (TypeError, "k is of type ndarray, but others are PyTorch's", lambda: fa.attention(q, K, k)),
        "strides": (ValueError, "last dimension", lambda: fa.attention(torch.ones(2, 4, 8, 5).mT, k, k)),
        "NaN scale": (ValueError, "scale is NaN", lambda: fa.attention(q, k, k, scale=float("nan"))),
    }
    error, sentence, call = cases[name]
    with pytest.raises(error, match=sentence):
        call()
