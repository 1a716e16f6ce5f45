"""compare.py FOLDER: every out_NAME.safetensors against NAME.safetensors, by the formula in plain Python."""
import json
import math
import struct
import sys
from pathlib import Path

TOLERANCE = {"F64": 1e-12, "F32": 2e-5, "F16": 1e-2, "BF16": 8e-2}
FORMATS = {"F32": "f", "F64": "d", "F16": "e", "I32": "i", "I64": "q", "U8": "B", "BOOL": "?"}


def unpack(dtype, data):
    if dtype == "BF16":
        return [struct.unpack("<f", b"\0\0" + data[i : i + 2])[0] for i in range(0, len(data), 2)]
    size = struct.calcsize("<" + FORMATS[dtype])
    return list(struct.unpack(f"<{len(data) // size}{FORMATS[dtype]}", data))


def load(path):
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = Tensor(entry["dtype"], entry["shape"], unpack(entry["dtype"], data[begin:end]))
    return tensors, metadata


class Tensor:
    def __init__(self, dtype, shape, values):
        self.dtype, self.shape, self.values = dtype, shape, values

    def at(self, *index):
        """Missing leading dimensions and those of size 1 repeat."""
        place = 0
        for size, i in zip(self.shape, index[len(index) - len(self.shape) :]):
            place = place * size + (0 if size == 1 else i)
        return self.values[place]


class Problem:
    """One sequence of one file: rows of q from `q_lo` and of k from `k_lo`, in either order of dimensions."""

    def __init__(self, tensors, metadata):
        self.t, self.m = tensors, metadata
        self.packed = "cu_q" in tensors
        self.blhd = metadata.get("layout") == "blhd" or self.packed
        self.q_lo = self.k_lo = 0

    def get(self, name, b, h, i, d):
        if self.packed:
            b, i = 0, i + (self.q_lo if name in ("q", "dout") else self.k_lo)
        return self.t[name].at(b, i, h, d) if self.blhd else self.t[name].at(b, h, i, d)

    def dims(self, name):
        shape = [1] * (4 - len(self.t[name].shape)) + list(self.t[name].shape)
        return (shape[0], shape[2], shape[1], shape[3]) if self.blhd else tuple(shape)

    def counts(self, b, h, i, j, off):
        p = i + off
        left = self.m.get("window_left", "none")
        right = "0" if self.m.get("causal") in ("1", "true") else self.m.get("window_right", "none")
        ok = (left == "none" or j >= p - int(left)) and (right == "none" or j <= p + int(right))
        if "lens_q" in self.t:
            ok = ok and i < self.t["lens_q"].at(b)
        if "lens_k" in self.t:
            ok = ok and j < self.t["lens_k"].at(b)
        if "mask" in self.t:
            ok = ok and self.t["mask"].at(b, h, i, j)
        if "block_mask" in self.t:
            row, column = i // int(self.m["block_q"]), j // int(self.m["block_k"])
            ok = ok and self.t["block_mask"].at(b, h, row, column)
        return ok


def attend(p, b, h, hk, lq, lk, D, Dv, got):
    """Yields (name, wanted, index) for out, lse and dq, and adds this head's share to `got` (dk, dv)."""
    t = p.t
    scale, cap = float(p.m.get("scale", 1 / math.sqrt(D))), float(p.m.get("softcap", 0))
    for i in range(lq):
        q = [p.get("q", b, h, i, d) for d in range(D)]
        keys = [j for j in range(lk) if p.counts(b, h, i, j, lk - lq)]
        s, slope = [], []
        for j in keys:
            x = scale * sum(q[d] * p.get("k", b, hk, j, d) for d in range(D))
            slope.append(1 - math.tanh(x / cap) ** 2 if cap else 1)
            x = cap * math.tanh(x / cap) if cap else x
            s.append(x + (t["bias"].at(b, h, i, j) if "bias" in t else 0))
        total = sum(map(math.exp, s)) + (math.exp(t["sinks"].at(h)) if "sinks" in t else 0)
        lse = math.log(total) if total else -math.inf
        P = [math.exp(x - lse) for x in s]
        v = [[p.get("v", b, hk, j, d) for d in range(Dv)] for j in keys]
        out = [sum(w * row[d] for w, row in zip(P, v)) for d in range(Dv)]
        yield "lse", lse, (b, h, i)
        for d in range(Dv):
            yield "out", out[d], (b, h, i, d)
        if "dout" not in t:
            continue
        do = [p.get("dout", b, h, i, d) for d in range(Dv)]
        extra = (t["dlse"].at(b, h, i) if "dlse" in t else 0) - sum(x * y for x, y in zip(do, out))
        ds = [w * (sum(x * y for x, y in zip(do, row)) + extra) * g for w, row, g in zip(P, v, slope)]
        for d in range(D):
            yield "dq", scale * sum(x * p.get("k", b, hk, j, d) for x, j in zip(ds, keys)), (b, h, i, d)
        for n, j in enumerate(keys):
            for d in range(D):
                got["dk", b, hk, j, d] = got.get(("dk", b, hk, j, d), 0) + scale * ds[n] * q[d]
            for d in range(Dv):
                got["dv", b, hk, j, d] = got.get(("dv", b, hk, j, d), 0) + P[n] * do[d]


def result(out, p, name, b, h, i, d=None):
    t = out[name]
    if p.packed:
        i += p.k_lo if name in ("dk", "dv") else p.q_lo
        return t.at(h, i) if d is None else t.at(i, h, d)
    if d is None:
        return t.at(b, h, i)
    return t.at(b, i, h, d) if p.blhd else t.at(b, h, i, d)


def check(folder, name):
    tensors, metadata = load(folder / f"{name}.safetensors")
    out, written = load(folder / f"out_{name}.safetensors")
    dtype = tensors["q"].dtype
    p = Problem(tensors, metadata)
    B, Hq, Lq, D = p.dims("q")
    _, Hkv, Lk, Dv = p.dims("v")
    if p.packed:
        B = len(tensors["cu_q"].values) - 1
    compared = 0

    def near(key, want, have):
        tolerance = TOLERANCE["F32" if key == "lse" and dtype in ("F16", "BF16") else dtype]
        if not (want == have or abs(want - have) <= tolerance * (1 + abs(want))):
            sys.exit(f"{name}: {key} is {have}, expected {want}")

    for b in range(B):
        if p.packed:
            p.q_lo, Lq = tensors["cu_q"].values[b], tensors["cu_q"].values[b + 1] - tensors["cu_q"].values[b]
            p.k_lo, Lk = tensors["cu_k"].values[b], tensors["cu_k"].values[b + 1] - tensors["cu_k"].values[b]
        shared = {}
        for h in range(Hq):
            for key, want, index in attend(p, b, h, h // (Hq // Hkv), Lq, Lk, D, Dv, shared):
                near(f"{key}{list(index)}", want, result(out, p, key, *index))
                compared += 1
        if "dout" in tensors:
            for hk in range(Hkv):
                for j in range(Lk):
                    for key, size in (("dk", D), ("dv", Dv)):
                        for d in range(size):
                            want = shared.get((key, b, hk, j, d), 0)
                            near(f"{key}{[b, hk, j, d]}", want, result(out, p, key, b, hk, j, d))
                            compared += 1
    pairs = {"out": "q", "dq": "q", "dk": "k", "dv": "v", "dbias": "bias", "dsinks": "sinks"}
    for key, shaped_as in pairs.items():
        if key in out and (out[key].shape[:-1] != tensors[shaped_as].shape[:-1] or
                           (key != "out" and out[key].shape != tensors[shaped_as].shape)):
            sys.exit(f"{name}: {key} has the shape {out[key].shape}")
    wanted = {"out", "lse"}
    if "dout" in tensors:
        wanted |= {"dq", "dk", "dv"} | ({"d" + x for x in ("bias", "sinks") if x in tensors})
    if set(out) != wanted or set(written) != {"flashback", "route"}:
        sys.exit(f"{name}: the file holds {sorted(out)} and the metadata {written}")
    summary = json.loads((folder / f"out_{name}.json").read_text())
    if not summary["errors"]["ok"] or summary["peak_extra_bytes"] <= 0 or summary["forward_ms"] <= 0:
        sys.exit(f"{name}: the summary says {summary}")
    if summary["shape"]["heads_q"] != Hq or summary["dtype"] != dtype.lower() or compared < 80:
        sys.exit(f"{name}: {compared} values compared, the summary says {summary}")


names = [path.name[4:-12] for path in Path(sys.argv[1]).glob("out_*.safetensors")]
if len(names) != 13:
    sys.exit(f"{len(names)} files to compare, expected 13")
for each in names:
    check(Path(sys.argv[1]), each)

# The order of dimensions changes nothing but the order.
first, _ = load(Path(sys.argv[1]) / "out_everything.safetensors")
second, _ = load(Path(sys.argv[1]) / "out_swapped.safetensors")
for key in ("lse", "dbias", "dsinks"):
    if first[key].values != second[key].values:
        sys.exit(f"{key} depends on the layout")
