"""The same attention by flashback, by PyTorch and by its definition in float64. All take and give torch tensors on the
CPU, [B, H, L, D], contiguous. Both libraries make their results anew in every call, as a training step does, and keep
what lies between the passes: flashback its workspace, PyTorch its graph."""

import ctypes
import math
import os
import pathlib
import sys

import targets
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "python"))
sys.dont_write_bytecode = True
import flashback_ctypes as flashback  # noqa: E402

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
CODES = {"f32": flashback.F32, "bf16": flashback.BF16, "f16": flashback.F16}
GRADIENTS = ("dq", "dk", "dv")


def openmp_runtimes():
    """Files of the OpenMP runtimes in this process."""
    found = set()
    for line in pathlib.Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.split(maxsplit=5)[5:]
        if path and os.path.basename(path[0]).startswith(("libgomp", "libomp", "libiomp")):
            found.add(os.path.realpath(path[0]))
    return sorted(found)


def separate_pools(lib, threads):
    """Do the two libraries keep threads of their own? Not where flashback's calls reach the runtime that PyTorch
    brings, which several files in openmp_runtimes() do not rule out; so threads are counted before and after the first
    call."""
    torch.ones(1 << 22).mul_(2)
    before = len(os.listdir("/proc/self/task"))
    case = targets.Case("f32", 64, 512, 8, 1, False)
    ours = Flashback(lib, case, threads, *(torch.ones(1, 8, 512, 64) for _ in range(4)))
    ours.forward()
    ours.close()
    return len(os.listdir("/proc/self/task")) > before


class Flashback:
    """One case through libflashback: out, lse = forward(); dq, dk, dv = backward()."""

    def __init__(self, lib, case, threads, q, k, v, dout):
        self.lib, self.inputs, self.results = lib, {"q": q, "k": k, "v": v, "dout": dout}, {}
        d = flashback.Desc()
        lib.fb_desc_init(d, ctypes.sizeof(d))
        d.dtype, d.threads = CODES[case.dtype], threads
        d.batch, d.heads_q, d.heads_kv = case.batch, case.heads, case.heads
        d.len_q = d.len_k = case.length
        d.head_dim = d.head_dim_v = case.dim
        d.window = flashback.Window(flashback.UNBOUNDED, 0 if case.causal else flashback.UNBOUNDED)
        self.plan, self.workspace = ctypes.c_void_p(), flashback.Ref()
        flashback.check(lib, lib.fb_plan_create(self.plan, d))
        self.workspace_size = lib.fb_plan_workspace(self.plan)
        flashback.check(lib, lib.fb_alloc(self.workspace, flashback.CPU, 0, self.workspace_size))

    def close(self):
        self.lib.fb_free(self.workspace, flashback.CPU, 0)
        self.lib.fb_plan_destroy(self.plan)

    def isa(self):
        """The word after "kernels: cpu" of the plan's explanation."""
        text = ctypes.create_string_buffer(16384)
        self.lib.fb_plan_explain(self.plan, text, len(text))
        for line in text.value.decode().splitlines():
            if line.startswith("kernels: cpu "):
                return line.split()[2].rstrip(",;")
        return "?"

    def _call(self, verb, given, wanted, poison):
        io = flashback.Io()
        self.lib.fb_io_init(io, ctypes.sizeof(io))
        io.workspace, io.workspace_size = self.workspace, self.workspace_size
        for name in given:
            setattr(io, name, flashback.Ref({**self.inputs, **self.results}[name].data_ptr(), 0))
        made = {}
        for name, (like, dtype) in wanted.items():
            shape = like.shape[:3] if name == "lse" else like.shape
            made[name] = torch.empty(shape, dtype=dtype)
            if poison:
                made[name].fill_(math.nan)
            setattr(io, name, flashback.Ref(made[name].data_ptr(), 0))
        flashback.check(self.lib, verb(self.plan, io))
        return made

    def forward(self, poison=False):
        q = self.inputs["q"]
        self.results = self._call(
            self.lib.fb_forward, ("q", "k", "v"), {"out": (q, q.dtype), "lse": (q, torch.float32)}, poison
        )
        return self.results["out"]

    def backward(self, poison=False):
        """After a forward."""
        q = self.inputs["q"]
        given = ("q", "k", "v", "out", "lse", "dout")
        made = self._call(self.lib.fb_backward, given, {name: (q, q.dtype) for name in GRADIENTS}, poison)
        return tuple(made[name] for name in GRADIENTS)


class Torch:
    """The same by torch.nn.functional.scaled_dot_product_attention; `backend` names its kernel. Inputs want gradients
    in the forward too, so that it keeps the logsumexp (fused) or the probabilities (unfused)."""

    BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}

    def __init__(self, backend, case, q, k, v, dout):
        self.backend, self.causal, self.dout, self.out = self.BACKENDS[backend], case.causal, dout, None
        self.inputs = tuple(x.detach().requires_grad_() for x in (q, k, v))

    def forward(self):
        with sdpa_kernel(self.backend):
            self.out = torch.nn.functional.scaled_dot_product_attention(*self.inputs, is_causal=self.causal)
        return self.out

    def backward(self):
        """After a forward; its graph stays for the next call."""
        return torch.autograd.grad(self.out, self.inputs, self.dout, retain_graph=True)


def exact_head(q, k, v, dout, causal):
    """out, dq, dk, dv of one head, [L, D] in float64: the formulas of flashback.h, a few [L, L] at a time."""
    scale = 1 / math.sqrt(q.shape[1])
    p = (q @ k.T).mul_(scale)
    if causal:
        p.masked_fill_(torch.ones(p.shape, dtype=torch.bool).triu_(1), -math.inf)
    p.sub_(torch.logsumexp(p, 1, keepdim=True)).exp_()
    out, dv = p @ v, p.T @ dout
    ds = (dout @ v.T).sub_((dout * out).sum(1, keepdim=True)).mul_(p).mul_(scale)
    return out, ds @ k, ds.T @ q, dv


def errors(found, case, q, k, v, dout):
    """{side: {tensor: (largest, root mean square)}} of found = {side: {"out": ..., "dq": ..., "dk": ..., "dv": ...}},
    with one side more, "rounded": what rounding the exact result once leaves, the least that the dtype can hold. Head
    by head, so that float64 takes the memory of one."""
    names, sides = ("out", *GRADIENTS), (*found, "rounded")
    worst = {(side, name): 0.0 for side in sides for name in names}
    square = dict(worst)
    for b in range(case.batch):
        for h in range(case.heads):
            exact = exact_head(*(x[b, h].double() for x in (q, k, v, dout)), case.causal)
            for at in worst:
                side, name = at
                want = exact[names.index(name)]
                got = want.to(q.dtype) if side == "rounded" else found[side][name][b, h].detach()
                error = (got.double() - want).abs_()
                largest = error.max().item()  # NaN if any is, which Python's max might drop
                worst[at] = largest if math.isnan(largest) else max(worst[at], largest)
                square[at] += error.square_().sum().item()
    return {
        side: {name: (worst[side, name], math.sqrt(square[side, name] / q.numel())) for name in names}
        for side in sides
    }
