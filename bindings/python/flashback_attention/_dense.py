"""The formula as it stands, with the whole score matrix, in PyTorch's own operations: what second derivatives go
through. It takes O(Lq Lk) memory. Computed in f32 for 16-bit types; nothing here is fast.
"""

import math

import torch


def attention(q, k, v, bias, mask, block_mask, sinks, cu_q, cu_k, lens_q, lens_k, options):
    """out and lse, as _torch.py's operation gives them, any number of times differentiable."""
    if cu_q is None:
        cells = _cells(q, k, mask, block_mask, lens_q, lens_k, options)
        return _formula(q, k, v, bias, sinks, cells, options)
    outs, lses, end = [], [], 0
    for b in range(len(cu_q) - 1):
        (q_lo, end), (k_lo, k_hi) = cu_q[b : b + 2].tolist(), cu_k[b : b + 2].tolist()
        one = [x[lo:hi].transpose(0, 1)[None] for x, lo, hi in ((q, q_lo, end), (k, k_lo, k_hi), (v, k_lo, k_hi))]
        here = [_of_sequence(t, b, end - q_lo, k_hi - k_lo) for t in (bias, mask)]
        cells = _cells(one[0], one[1], here[1], _of_sequence(block_mask, b), None, None, options)
        out, lse = _formula(*one, here[0], sinks, cells, options)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    out = torch.cat([*outs, q.new_zeros(q.shape[0] - end, q.shape[1], v.shape[2])])
    fill = outs[0].new_full((q.shape[1], q.shape[0] - end), -math.inf) if outs else q.new_zeros(q.shape[1], q.shape[0])
    return out, torch.cat([*lses, fill.to(lses[0].dtype if lses else fill.dtype)], dim=1)


def _of_sequence(tensor, b, rows=None, cols=None):
    """The part of a [B|1,H|1,rows|1,cols|1] tensor that one sequence uses."""
    if tensor is None:
        return None
    part = tensor[b : b + 1] if tensor.shape[0] > 1 else tensor
    return part[:, :, : rows if part.shape[2] > 1 else None, : cols if part.shape[3] > 1 else None]


def _cells(q, k, mask, block_mask, lens_q, lens_k, options):
    """Which cells count, as a boolean tensor that broadcasts to [B,Hq,Lq,Lk]."""
    len_q, len_k, device = q.shape[2], k.shape[2], q.device
    i, j = torch.arange(len_q, device=device)[:, None], torch.arange(len_k, device=device)[None]
    p = i + options.position_offset + (0 if options.top_left else len_k - len_q)
    cells = torch.ones(1, 1, len_q, len_k, dtype=torch.bool, device=device)
    if options.left >= 0:
        cells = cells & (p - j <= options.left)
    if options.right >= 0:
        cells = cells & (j - p <= options.right)
    if mask is not None:
        cells = cells & mask
    if block_mask is not None:
        cells = cells & block_mask[:, :, i // options.block_q, j // options.block_k]
    if lens_q is not None:
        cells = cells & (i < lens_q[:, None, None, None])
    if lens_k is not None:
        cells = cells & (j < lens_k[:, None, None, None])
    return cells


def _formula(q, k, v, bias, sinks, cells, options):
    kept, stat = q.dtype, torch.float64 if q.dtype == torch.float64 else torch.float32
    q, k, v = (x.to(stat) for x in (q, k, v))
    group = q.shape[1] // max(k.shape[1], 1)
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    s = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if options.scale is None else options.scale)
    if options.softcap:
        s = options.softcap * torch.tanh(s / options.softcap)
    if bias is not None:
        bias = bias.to(stat)
        cells = cells & (bias != -math.inf)
        s = s + bias.masked_fill(bias == -math.inf, 0)
    cells = cells.expand_as(s)
    if s.shape[-1] == 0:
        empty = s.new_zeros(s.shape[:-1])
        lse = empty - math.inf if sinks is None else sinks.to(stat)[:, None] + empty
        return (s @ v).to(kept), lse
    m = s.detach().masked_fill(~cells, -math.inf).amax(-1, keepdim=True)
    sink = None if sinks is None else sinks.to(stat)[:, None, None]
    if sink is not None:
        m = torch.maximum(m, sink.detach())
    m = m.masked_fill(m == -math.inf, 0)
    # What does not count becomes 0 before exp, not after: 0 times infinity would be NaN in the derivative.
    e = torch.exp((s - m).masked_fill(~cells, 0)).masked_fill(~cells, 0)
    z = e.sum(-1, keepdim=True)
    if sink is not None:
        z = z + torch.exp(sink - m)
    empty = z == 0
    z = z.masked_fill(empty, 1)
    lse = (m + torch.log(z)).masked_fill(empty, -math.inf)
    return ((e / z) @ v).to(kept), lse[..., 0]


def second_order(dout, dlse, operands, options, wanted, cotangents):
    """The vector-Jacobian product of the backward pass as a function of dout, dlse, q, k, v, bias and sinks: gradients
    for these seven, None where there is nothing. `cotangents` are those of dq, dk, dv, dbias, dsinks."""
    inputs = {"dout": dout, "dlse": dlse, **dict(zip(("q", "k", "v", "bias"), operands)), "sinks": operands[6]}
    with torch.enable_grad():
        leaves = {n: None if t is None else t.detach().requires_grad_() for n, t in inputs.items()}
        first = [leaves[n] for n in ("q", "k", "v", "bias", "sinks")]
        asked = [(x, t) for x, w, t in zip(first, wanted, cotangents) if w and t is not None]
        if not asked:
            return [None] * len(inputs)
        results = attention(*first[:4], *operands[4:6], first[4], *operands[7:], options)
        pairs = [(y, leaves[n]) for y, n in zip(results, ("dout", "dlse")) if leaves[n] is not None]
        gradients = _vjp(pairs, [x for x, _ in asked], create_graph=True)
        pairs = [(g, t) for g, (_, t) in zip(gradients, asked) if g is not None and g.requires_grad]
        names = [n for n, t in leaves.items() if t is not None]
        found = dict(zip(names, _vjp(pairs, [leaves[n] for n in names]))) if pairs else {}
    return [found.get(n) for n in inputs]


def _vjp(pairs, inputs, create_graph=False):
    outputs, cotangents = zip(*pairs)
    return torch.autograd.grad(outputs, inputs, cotangents, create_graph=create_graph, allow_unused=True)
