"""Attention and its gradients in float64, from the mathematics alone: dense, one row of the score matrix at a time,
sums by math.fsum, the Jacobian of the softmax written out. It shares no idea with src/cpu/ref.c beyond the formulas of
flashback.h, which is what makes it worth comparing with. Standard library only.

Tensors are flat lists, contiguous in the order of the API: rows of [B,H,L] or, packed, of [total,H]. Inputs come from
`val`: multiples of 1/64 from -1 to 1, exact in every dtype.
"""

import math
from dataclasses import dataclass, field

WORD = (1 << 64) - 1


def val(seed, i):
    x = (seed * 0x9E3779B97F4A7C15 + i * 0xBF58476D1CE4E5B9) & WORD
    x ^= x >> 31
    x = (x * 0x94D049BB133111EB) & WORD
    x ^= x >> 29
    return ((x >> 40) % 129 - 64) / 64


def vals(seed, count):
    return [val(seed, i) for i in range(count)]


@dataclass
class Problem:
    """The fields of fb_desc that have a meaning, plus the contents that belong to them. None: not used."""

    batch: int = 1
    heads_q: int = 1
    heads_kv: int = 1
    len_q: int = 1
    len_k: int = 1
    head_dim: int = 4
    head_dim_v: int = 4
    left: int = None
    right: int = None
    top_left: bool = False
    position_offset: int = 0
    scale: float = None
    softcap: float = 0.0
    bias: tuple = None  # shape
    mask: tuple = None  # shape
    block: tuple = None  # block_q, block_k, block_batch, block_heads
    sinks: bool = False
    dlse: bool = False
    lens_q: list = None
    lens_k: list = None
    cu_q: list = None
    cu_k: list = None
    tensors: dict = field(default_factory=dict)

    @property
    def packed(self):
        return self.cu_q is not None

    @property
    def rows_q(self):
        return self.cu_q[-1] if self.packed else self.batch * self.len_q

    @property
    def rows_k(self):
        return self.cu_k[-1] if self.packed else self.batch * self.len_k

    @property
    def block_shape(self):
        block_q, block_k, batch, heads = self.block
        return batch, heads, -(-self.len_q // block_q), -(-self.len_k // block_k)

    def sequence(self, b):
        """Rows that exist, for queries and keys."""
        if self.packed:
            return self.cu_q[b + 1] - self.cu_q[b], self.cu_k[b + 1] - self.cu_k[b]
        return self.len_q, self.len_k

    def row_q(self, b, h, i):
        return (self.cu_q[b] + i) * self.heads_q + h if self.packed else (b * self.heads_q + h) * self.len_q + i

    def row_k(self, b, h, j):
        return (self.cu_k[b] + j) * self.heads_kv + h if self.packed else (b * self.heads_kv + h) * self.len_k + j

    def lse_at(self, b, h, i):
        return h * self.cu_q[-1] + self.cu_q[b] + i if self.packed else self.row_q(b, h, i)


def fill(p):
    """Inputs by seed: q 1, k 2, v 3, dout 4, bias 5, masks 6 and 9, sinks 7, dlse 8."""
    t = p.tensors
    t["q"] = vals(1, p.rows_q * p.heads_q * p.head_dim)
    t["k"] = vals(2, p.rows_k * p.heads_kv * p.head_dim)
    t["v"] = vals(3, p.rows_k * p.heads_kv * p.head_dim_v)
    t["dout"] = vals(4, p.rows_q * p.heads_q * p.head_dim_v)
    if p.bias:
        t["bias"] = vals(5, math.prod(p.bias))
    if p.mask:
        t["mask"] = [int(x >= -0.25) for x in vals(6, math.prod(p.mask))]
        batch, heads, rows, cols = p.mask
        if rows > 1:  # one row without any key
            at = ((batch - 1) * heads * rows + 1) * cols
            t["mask"][at : at + cols] = [0] * cols
    if p.block:
        t["block_mask"] = [int(x >= -0.25) for x in vals(9, math.prod(p.block_shape))]
    if p.sinks:
        t["sinks"] = vals(7, p.heads_q)
    if p.dlse:
        t["dlse"] = vals(8, p.rows_q * p.heads_q)
    return p


def repeated(shape, *index):
    """Flat index into a tensor whose dimensions of size 1 repeat."""
    at = 0
    for size, x in zip(shape, index):
        at = at * size + (0 if size == 1 else x)
    return at


def counts(p, b, h, i, j):
    """Does cell (i,j) count? Every constraint must allow it."""
    len_q, len_k = p.sequence(b)
    position = i + (0 if p.top_left else len_k - len_q) + p.position_offset
    if p.left is not None and j < position - p.left:
        return False
    if p.right is not None and j > position + p.right:
        return False
    if p.lens_q is not None and i >= p.lens_q[b]:
        return False
    if p.lens_k is not None and j >= p.lens_k[b]:
        return False
    if p.mask and not p.tensors["mask"][repeated(p.mask, b, h, i, j)]:
        return False
    if p.block:
        block_q, block_k = p.block[:2]
        if not p.tensors["block_mask"][repeated(p.block_shape, b, h, i // block_q, j // block_k)]:
            return False
    return not (p.bias and p.tensors["bias"][repeated(p.bias, b, h, i, j)] == -math.inf)


def dot(x, y):
    return math.fsum(a * b for a, b in zip(x, y))


def attention(p):
    """All outputs: out, lse, dq, dk, dv, dbias, dsinks."""
    t, D, Dv = p.tensors, p.head_dim, p.head_dim_v
    scale = 1 / math.sqrt(D) if p.scale is None else p.scale
    r = {
        "out": [0.0] * len(t["dout"]),
        "lse": [-math.inf] * (p.rows_q * p.heads_q),
        "dq": [0.0] * len(t["q"]),
        "dk": [0.0] * len(t["k"]),
        "dv": [0.0] * len(t["v"]),
        "dbias": [0.0] * len(t.get("bias", ())),
        "dsinks": [0.0] * len(t.get("sinks", ())),
    }

    def row(name, at, width):
        return slice(at * width, (at + 1) * width), t[name][at * width : (at + 1) * width]

    for b in range(p.batch):
        len_q, len_k = p.sequence(b)
        for h in range(p.heads_q):
            h_kv = h // (p.heads_q // p.heads_kv)
            keys = [(j, *row("k", p.row_k(b, h_kv, j), D), *row("v", p.row_k(b, h_kv, j), Dv)) for j in range(len_k)]
            for i in range(len_q):
                at_q, q = row("q", p.row_q(b, h, i), D)
                at_o, dout = row("dout", p.row_q(b, h, i), Dv)
                cells = [cell for cell in keys if counts(p, b, h, i, cell[0])]
                raw = [scale * dot(q, k) for _, _, k, _, _ in cells]
                if p.softcap:
                    raw = [p.softcap * math.tanh(s / p.softcap) for s in raw]
                S = list(raw)
                if p.bias:
                    S = [s + t["bias"][repeated(p.bias, b, h, i, cell[0])] for s, cell in zip(raw, cells)]
                sink = t["sinks"][h] if p.sinks else -math.inf
                m = max(S + [sink])
                if m == -math.inf:
                    continue
                e = [math.exp(s - m) for s in S]
                Z = math.fsum(e + [math.exp(sink - m)])
                P, P_sink = [x / Z for x in e], math.exp(sink - m) / Z
                r["lse"][p.lse_at(b, h, i)] = m + math.log(Z)
                r["out"][at_o] = [math.fsum(P[c] * cells[c][4][d] for c in range(len(P))) for d in range(Dv)]

                # d out / d S is diag(P) - P P^T, the sink being one more column with value 0; d lse / d S is P.
                dP = [dot(dout, v) for _, _, _, _, v in cells]
                mean = dot(P, dP)
                dlse = t["dlse"][p.lse_at(b, h, i)] if p.dlse else 0.0
                if p.sinks:
                    r["dsinks"][h] += P_sink * (dlse - mean)
                for c, (j, at_k, k, at_v, _) in enumerate(cells):
                    dS = P[c] * (dP[c] - mean + dlse)
                    if p.bias:
                        r["dbias"][repeated(p.bias, b, h, i, j)] += dS
                    if p.softcap:
                        dS *= 1 - (raw[c] / p.softcap) ** 2
                    r["dq"][at_q] = [x + scale * dS * y for x, y in zip(r["dq"][at_q], k)]
                    r["dk"][at_k] = [x + scale * dS * y for x, y in zip(r["dk"][at_k], q)]
                    r["dv"][at_v] = [x + P[c] * y for x, y in zip(r["dv"][at_v], dout)]
    return r


def golden(batch, heads_q, heads_kv, len_q, len_k, head_dim, head_dim_v, **options):
    return dict(
        batch=batch,
        heads_q=heads_q,
        heads_kv=heads_kv,
        len_q=len_q,
        len_k=len_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        **options,
    )


# Options of the golden problems, of which tests/unit/test_ref.c knows the sums.
GOLDEN = {
    "G01 plain": golden(1, 2, 2, 5, 7, 8, 8),
    "G02 causal, Lq < Lk": golden(1, 2, 2, 3, 7, 8, 8, right=0),
    "G03 causal, Lq > Lk": golden(1, 2, 2, 7, 3, 8, 8, right=0),
    "G04 causal, top left": golden(1, 2, 2, 3, 7, 8, 8, right=0, top_left=True),
    "G05 window 2,0, group of 5": golden(1, 10, 2, 9, 9, 4, 4, left=2, right=0),
    "G06 window 0,3, Lq > Lk": golden(1, 2, 1, 9, 6, 4, 4, left=0, right=3),
    "G07 softcap, mask": golden(2, 2, 1, 4, 6, 8, 8, softcap=0.5, mask=(2, 1, 4, 6)),
    "G08 sinks, dlse, window": golden(1, 4, 2, 6, 6, 8, 8, left=1, right=0, sinks=True, dlse=True),
    "G09 D 4, Dv 2": golden(1, 1, 1, 8, 8, 4, 2),
    "G10 D 6, Dv 10, group of 3": golden(1, 6, 2, 4, 5, 6, 10, right=0),
    "G11 scale -0.5": golden(1, 2, 2, 5, 5, 8, 8, scale=-0.5),
    "G12 scale 0": golden(1, 1, 1, 4, 4, 8, 8, scale=0.0, right=0),
    "G13 bias 1,H,1,Lk": golden(2, 2, 2, 4, 5, 4, 4, bias=(1, 2, 1, 5)),
    "G14 bias B,1,Lq,Lk, mask": golden(2, 2, 1, 4, 5, 4, 4, bias=(2, 1, 4, 5), mask=(1, 1, 4, 5)),
    "G15 empty rows, sinks": golden(1, 2, 2, 5, 2, 4, 4, right=0, sinks=True, dlse=True),
}
