"""ONNX's own cases of its operator Attention (opsets 23 to 25), which the package onnx generates, against our forward.

Conventions of the operator become options: causal is top-left, or behind the past; a mask of rank 3 is [Hq,Lq,Lk], and
one that is shorter than the keys hides the rest; nonpad_kv_seqlen cuts keys for each batch entry and aligns causal
there; a window of -1 is unbounded. Outputs other than Y are left out: the present is past and new keys, end to end,
and score matrices are never made here."""

import warnings

import pytest

np = pytest.importorskip("numpy", reason="needs the package numpy")
node = pytest.importorskip("onnx.backend.test.case.node", reason="needs the package onnx")
import flashback_attention as fa  # noqa: E402
import onnx  # noqa: E402

RTOL = {"float32": 1e-3, "float16": 4e-3, "bfloat16": 2e-2}


def cases():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = node.collect_testcases("Attention")
    return {c.name: c for c in found if "_expanded" not in c.name}


CASES = cases()


def heads_apart(x, heads):
    """[B,L,H*D] as [B,H,L,D], a view."""
    return x if x.ndim == 4 else x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def mask_options(mask, dtype, len_k):
    """The operator's mask as ours: 4 dimensions, as many columns as keys, boolean or added."""
    if mask is None:
        return {}
    mask = mask[(None,) * (4 - mask.ndim)]
    missing = len_k - mask.shape[-1]
    if missing > 0:
        hidden = np.zeros((), bool) if mask.dtype == bool else np.array(-np.inf, mask.dtype)
        mask = np.concatenate([mask, np.broadcast_to(hidden, (*mask.shape[:-1], missing))], axis=-1)
    mask = mask[..., :len_k]
    return {"mask": mask} if mask.dtype == bool else {"bias": mask.astype(dtype)}


def entry(tensor, b):
    """One batch entry of a tensor whose first dimension may repeat."""
    return None if tensor is None else tensor[b : b + 1] if tensor.shape[0] > 1 else tensor


def run(q, k, v, mask, past, lengths, attributes):
    """Y of the operator, [B,Hq,Lq,Dv]."""
    offset = 0
    if past[0] is not None:
        offset = past[0].shape[2]
        k, v = (np.concatenate(pair, axis=2) for pair in zip(past, (k, v)))
    window = attributes.get("left_window_size", -1), attributes.get("right_window_size", -1)
    options = {
        "causal": bool(attributes.get("is_causal")), "window": window, "scale": attributes.get("scale"),
        "softcap": attributes.get("softcap", 0.0), "alignment": "top_left",
    }  # fmt: skip
    masks = mask_options(mask, q.dtype, k.shape[2])
    if lengths is None:
        return fa.attention(q, k, v, position_offset=offset, **options, **masks)
    parts = []
    for b, length in enumerate(lengths.tolist()):
        here = {name: np.ascontiguousarray(entry(x, b)[..., :length]) for name, x in masks.items()}
        one = q[b : b + 1], k[b : b + 1, :, :length], v[b : b + 1, :, :length]
        parts.append(fa.attention(*one, position_offset=length - q.shape[2], **options, **here))
    return np.concatenate(parts)


def test_there_are_cases():
    assert len(CASES) >= 87, "fewer of ONNX's cases than version 1.22 has"


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    case = CASES[name]
    (operator,) = case.model.graph.node
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in operator.attribute}
    inputs, outputs = case.data_sets[0]
    given = iter(inputs)
    named = [None if not word else next(given) for word in operator.input] + [None] * 7
    q, k, v, mask, past_k, past_v, lengths = named[:7]
    heads = attributes.get("q_num_heads"), attributes.get("kv_num_heads")
    q4, k4, v4 = heads_apart(q, heads[0]), heads_apart(k, heads[1]), heads_apart(v, heads[1])
    got = run(q4, k4, v4, mask, (past_k, past_v), lengths, attributes)
    if q.ndim == 3:
        got = got.transpose(0, 2, 1, 3).reshape(outputs[0].shape)
    want = outputs[0].astype(np.float64)
    assert got.dtype == outputs[0].dtype and np.isfinite(want).all()
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=RTOL[str(got.dtype)], atol=RTOL[str(got.dtype)] / 10)
