"""Writes the files that the tests of the program read: make.py FOLDER. Standard library only."""
import itertools
import json
import random
import struct
import sys
from pathlib import Path

FOLDER = Path(sys.argv[1])
FORMATS = {"F32": "f", "F64": "d", "F16": "e", "I32": "i", "I64": "q", "U8": "B", "BOOL": "?"}


def pack(dtype, values):
    if dtype == "BF16":
        return b"".join(struct.pack("<f", x)[2:] for x in values)
    return struct.pack(f"<{len(values)}{FORMATS[dtype]}", *values)


def count(shape):
    n = 1
    for size in shape:
        n *= size
    return n


def normal(shape, seed):
    generator = random.Random(seed)
    return [generator.gauss(0, 1) for _ in range(count(shape))]


def save(name, tensors, metadata=None):
    """tensors: name -> (dtype, shape, values)"""
    header, data = {}, b""
    if metadata:
        header["__metadata__"] = metadata
    for key, (dtype, shape, values) in tensors.items():
        piece = pack(dtype, values)
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(piece)]}
        data += piece
    text = json.dumps(header).encode()
    (FOLDER / name).write_bytes(struct.pack("<Q", len(text)) + text + data)


def qkv(dtype="F32", q=(1, 2, 5, 8), k=(1, 1, 7, 8), v=None, dout=True):
    v = v or k
    tensors = {"q": (dtype, q, normal(q, 1)), "k": (dtype, k, normal(k, 2)), "v": (dtype, v, normal(v, 3))}
    if dout:
        shape = (*q[:-1], v[-1])
        tensors["dout"] = (dtype, shape, normal(shape, 4))
    return tensors


def save_npy(name, descr, shape, values, dtype):
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {tuple(shape)!r}, }}"
    header += " " * (63 - (len(header) + 10) % 64) + "\n"
    preamble = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header))
    (FOLDER / name).write_bytes(preamble + header.encode() + pack(dtype, values))


def good():
    for dtype in ("F32", "F16", "BF16", "F64"):
        save(f"{dtype.lower()}.safetensors", qkv(dtype), {"causal": "true", "scale": "0.5"})
    save("forward.safetensors", qkv(dout=False))
    save("flat.safetensors", qkv(q=(5, 8), k=(7, 8)))
    save("three.safetensors", qkv(q=(2, 5, 8), k=(1, 7, 8), v=(1, 7, 16)))
    window = {"window_left": "2", "window_right": "0", "softcap": "3", "format": "pt", "about.it": "a test"}
    save("window.safetensors", qkv(), window)
    save("right.safetensors", qkv(), {"window_right": "3", "scale": "0.5"})
    save("blhd.safetensors", qkv(q=(2, 5, 4, 8), k=(2, 7, 2, 8)), {"layout": "blhd"})
    everything = qkv(q=(2, 4, 5, 8), k=(2, 2, 7, 8))
    everything["bias"] = ("F32", (4, 5, 7), normal((4, 5, 7), 5))
    everything["mask"] = ("BOOL", (2, 4, 5, 7), [i % 11 != i // 35 for i in range(280)])
    everything["sinks"] = ("F32", (4,), [0.5, -0.5, 1, 0])
    everything["dlse"] = ("F32", (2, 4, 5), normal((2, 4, 5), 6))
    everything["lens_q"] = ("I64", (2,), [5, 3])
    everything["lens_k"] = ("I32", (2,), [4, 7])
    save("everything.safetensors", everything)
    # The same options, but the dimensions of q, k, v and dout in the other order.
    swapped = dict(everything)
    for name in ("q", "k", "v", "dout"):
        dtype, (batch, heads, rows, cols), values = swapped[name]
        at = lambda b, h, i, d: values[((b * heads + h) * rows + i) * cols + d]
        order = itertools.product(range(batch), range(rows), range(heads), range(cols))
        turned = [at(b, h, i, d) for b, i, h, d in order]
        swapped[name] = (dtype, (batch, rows, heads, cols), turned)
    save("swapped.safetensors", swapped, {"layout": "blhd"})
    packed = qkv(q=(9, 4, 8), k=(10, 2, 8))
    packed["cu_q"] = ("I32", (4,), [0, 3, 3, 8])
    packed["cu_k"] = ("I64", (4,), [0, 4, 6, 10])
    save("packed.safetensors", packed, {"causal": "1"})
    blocks = qkv(q=(1, 1, 40, 8), k=(1, 1, 33, 8))
    blocks["block_mask"] = ("U8", (1, 1, 3, 2), [1, 0, 1, 1, 0, 1])
    save("blocks.safetensors", blocks, {"block_q": "16", "block_k": "32"})
    for name, (dtype, shape, values) in qkv().items():
        save_npy(f"{name}.npy", "<f4", shape, values, dtype)


def bad():
    """Each of these is refused; the words that the sentence must have are in bad.txt."""
    words = {}

    def refuse(name, text, tensors, metadata=None):
        save(f"bad_{name}.safetensors", tensors, metadata)
        words[f"bad_{name}.safetensors"] = text

    refuse("name", "'query' is unknown", {"query": ("F32", (1,), [0])})
    refuse("missing", "v is missing", {name: qkv()[name] for name in ("q", "k")})
    refuse("key", "key 'casual' is unknown", qkv(), {"casual": "true"})
    refuse("value", "causal is 'maybe'", qkv(), {"causal": "maybe"})
    refuse("both", "causal means 0", qkv(), {"causal": "true", "window_right": "3"})
    refuse("scale", "scale is 'nan'", qkv(), {"scale": "nan"})
    refuse("k", "k has the shape [1,1,7,9]", qkv(k=(1, 1, 7, 9)))
    refuse("v", "v has the shape [1,1,6,8]", qkv(v=(1, 1, 6, 8)))
    refuse("rank", "k has the shape [7,8]", qkv(k=(7, 8)))
    refuse("dout", "dout has the shape", {**qkv(), "dout": ("F32", (1, 2, 4, 8), normal((64,), 1))})
    refuse("dtype", "k is f16, but q is f32", {**qkv(), "k": qkv("F16")["k"]})
    refuse("ints", "q must hold f32", {**qkv(), "q": ("I32", (1, 2, 5, 8), [0] * 80)})
    refuse("mask", "mask must hold booleans", {**qkv(), "mask": ("F32", (5, 7), [0] * 35)})
    refuse("maskshape", "mask has the shape [5,6]", {**qkv(), "mask": ("U8", (5, 6), [0] * 30)})
    refuse("sinks", "sinks has the shape [3]", {**qkv(), "sinks": ("F32", (3,), [0] * 3)})
    refuse("sinkrank", "sinks has the shape [1,2]; expected [2]", {**qkv(), "sinks": ("F32", (1, 2), [0, 0])})
    refuse("dlseshape", "dlse has the shape [1,5,2]; expected [1,2,5]",
           {**qkv(), "dlse": ("F32", (1, 5, 2), [0] * 10)})
    refuse("blockshape", "block_mask has the shape [1,1,2,1]; expected [1,1,1,1]",
           {**qkv(), "block_mask": ("U8", (1, 1, 2, 1), [1, 1])}, {"block_q": "16", "block_k": "16"})
    refuse("dlse", "no dout", {**qkv(dout=False), "dlse": ("F32", (1, 2, 5), [0] * 10)})
    refuse("lens", "lens_k[0] is 8", {**qkv(), "lens_k": ("I32", (1,), [8])})
    refuse("blocks", "needs block_q and block_k", {**qkv(), "block_mask": ("U8", (1, 1, 1, 1), [1])})
    refuse("noblocks", "no block_mask", qkv(), {"block_q": "16", "block_k": "16"})
    cuts = qkv(q=(9, 4, 8), k=(10, 2, 8))
    refuse("cu", "cu_k is missing", {**cuts, "cu_q": ("I32", (2,), [0, 9])})
    refuse("cut", "cu_q[2] is 3",
           {**cuts, "cu_q": ("I32", (3,), [0, 4, 3]), "cu_k": ("I32", (3,), [0, 4, 5])})
    refuse("total", "cu_k[1] is 11", {**cuts, "cu_q": ("I32", (2,), [0, 9]), "cu_k": ("I32", (2,), [0, 11])})
    whole = (FOLDER / "f32.safetensors").read_bytes()
    for size in (0, 7, 40, len(whole) - 1):
        text = "dout" if size > 40 else "header length"
        (FOLDER / f"bad_cut{size}.safetensors").write_bytes(whole[:size])
        words[f"bad_cut{size}.safetensors"] = text
    (FOLDER / "bad_npy.npy").write_bytes((FOLDER / "q.npy").read_bytes()[:-1])
    (FOLDER / "bad.txt").write_text("".join(f"{name}\t{text}\n" for name, text in words.items()))


good()
bad()
