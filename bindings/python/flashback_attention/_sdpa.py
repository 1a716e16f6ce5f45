"""replace_sdpa: what calls torch.nn.functional.scaled_dot_product_attention gets flashback where that is exact."""

import collections
import contextlib
import threading
import typing

_lock = threading.Lock()
_active = []  # reports, outermost first; the replacement stays while there is one
_original = None


class Report:
    """What `replace_sdpa` did: `routed` calls went to flashback, `left_alone` counts the others by reason."""

    def __init__(self) -> None:
        self.routed = 0
        self.left_alone: typing.Counter[str] = collections.Counter()

    def __str__(self) -> str:
        lines = [f"{self.routed} calls of scaled_dot_product_attention went to flashback"]
        lines += [f"{count} did not: {reason}" for reason, count in self.left_alone.most_common()]
        return "\n".join(lines)


def _reason(q, k, v, attn_mask, dropout_p, is_causal, enable_gqa):
    """Why a call is left to PyTorch, or None. Shapes that neither takes are left to it too: the error is its own."""
    import torch

    if not all(isinstance(x, torch.Tensor) for x in (q, k, v)):
        return "operands are no tensors"
    if dropout_p:
        return "dropout"
    if any(x.is_nested for x in (q, k, v)):
        return "nested tensors"
    if any(x.dim() != 4 for x in (q, k, v)):
        return "not [batch, heads, length, head_dim]"
    if attn_mask is not None and is_causal:
        return "attn_mask together with is_causal"
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3]:
        return "shapes that broadcast or differ"
    if q.shape[1] != k.shape[1] and not (enable_gqa and k.shape[1] and q.shape[1] % k.shape[1] == 0):
        return "heads that differ without enable_gqa"
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        return "operands of several types or devices"
    if q.device.type not in ("cpu", "cuda"):
        return f"tensors on {q.device.type}"
    if any(x.stride(-1) != 1 and x.shape[-1] > 1 for x in (q, k, v)):
        return "a last dimension that is not contiguous"
    return _mask_reason(q, k, attn_mask)


def _mask_reason(q, k, mask):
    import torch

    if mask is None:
        return None
    want = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if mask.dim() > 4 or any(m not in (1, w) for m, w in zip(reversed(mask.shape), reversed(want))):
        return "a mask whose shape does not broadcast"
    if mask.dtype != torch.bool and mask.dtype != q.dtype:
        return f"a mask of {mask.dtype} for queries of {q.dtype}"
    if mask.stride(-1) != 1 and mask.shape[-1] > 1:
        return "a mask whose last dimension is not contiguous"
    return None


def _replacement(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    import torch

    from . import NoDevice, attention

    def leave(reason):
        for report in _active:
            report.left_alone[reason] += 1
        more = {"enable_gqa": True} if enable_gqa else {}  # PyTorch before 2.5 has no such argument
        return _original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **more)

    reason = _reason(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    if reason:
        return leave(reason)
    options = {"causal": is_causal, "alignment": "top_left", "scale": scale}
    if attn_mask is not None:
        mask = attn_mask[(None,) * (4 - attn_mask.dim())]
        options["mask" if mask.dtype == torch.bool else "bias"] = mask
    try:
        out = attention(query, key, value, **options)
    except (ValueError, TypeError, NoDevice) as error:
        return leave(str(error))
    for report in _active:
        report.routed += 1
    return out


@contextlib.contextmanager
def replace_sdpa() -> typing.Iterator[Report]:
    """While it is open, torch.nn.functional.scaled_dot_product_attention is flashback's attention, in all threads.

    Calls that it cannot compute exactly (dropout, odd shapes, masks of another type, other devices) go to PyTorch's
    own, and the Report counts them by reason. Causal masks are aligned at the first position, as PyTorch has them. A
    row that may see nothing gives 0. Code that took the function by name before (`from torch.nn.functional import
    ...`) keeps PyTorch's. Contexts may be nested; each counts for itself. A call in a compiled graph counts when it is
    traced.

        with flashback_attention.replace_sdpa() as report:
            model(x).loss.backward()
        print(report)

    Raises: ImportError without PyTorch.
    """
    import torch

    global _original
    report = Report()
    functional = torch.nn.functional
    with _lock:
        if not _active:
            _original = functional.scaled_dot_product_attention
            functional.scaled_dot_product_attention = _replacement
        _active.append(report)
    try:
        yield report
    finally:
        with _lock:
            _active.remove(report)
            if not _active and functional.scaled_dot_product_attention is _replacement:
                functional.scaled_dot_product_attention = _original
