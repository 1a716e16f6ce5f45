"""The same attention on a GPU by flashback, by PyTorch's kernels, by FlashAttention-3, by the plain formula in PyTorch,
and by its definition in float64. All take and give torch tensors on the device, [B, H, L, D], and work on its current
stream. Every side makes its results anew in every call, as a training step does."""

import contextlib
import ctypes
import math
import pathlib
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests" / "python"))
sys.dont_write_bytecode = True
import flashback_ctypes as flashback  # noqa: E402

CUDA = 1  # FB_CUDA
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
CODES = {"f32": flashback.F32, "bf16": flashback.BF16, "f16": flashback.F16}
RESULTS = ("out", "dq", "dk", "dv")


def describe(lib, case, index):
    d = flashback.Desc()
    lib.fb_desc_init(d, ctypes.sizeof(d))
    d.device, d.index, d.dtype = CUDA, index, CODES[case.dtype]
    d.batch, d.heads_q, d.heads_kv = case.batch, case.heads, case.heads_kv
    d.len_q = d.len_k = case.length
    d.head_dim = d.head_dim_v = case.dim
    d.window = flashback.Window(flashback.UNBOUNDED, 0 if case.causal else flashback.UNBOUNDED)
    return d


class Flashback:
    """Through the C interface. The workspace stays from call to call."""

    def __init__(self, lib, case, index, q, k, v, dout):
        self.lib, self.inputs, self.dout = lib, (q, k, v), dout
        self.plan, self.io = ctypes.c_void_p(), flashback.Io()
        flashback.check(lib, lib.fb_plan_create(self.plan, describe(lib, case, index)))
        size = lib.fb_plan_workspace(self.plan)
        self.workspace = torch.empty(max(size, 1), dtype=torch.uint8, device=q.device)
        lib.fb_io_init(self.io, ctypes.sizeof(self.io))
        self.io.workspace.data, self.io.workspace_size = self.workspace.data_ptr(), size
        self.io.stream = torch.cuda.current_stream(q.device).cuda_stream
        self.point(q=q, k=k, v=v, dout=dout)
        self.out = self.lse = None

    def close(self):
        self.lib.fb_plan_destroy(self.plan)
        self.workspace = self.out = self.lse = None

    def point(self, **tensors):
        for name, tensor in tensors.items():
            getattr(self.io, name).data = tensor.data_ptr()

    def context(self):
        return contextlib.nullcontext()

    def forward(self, poison=False):
        q, _, v = self.inputs
        self.out = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
        self.lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        if poison:
            self.out.fill_(math.nan)
            self.lse.fill_(math.nan)
        self.point(out=self.out, lse=self.lse)
        flashback.check(self.lib, self.lib.fb_forward(self.plan, self.io))
        return self.out

    def backward(self, poison=False):
        """After a forward."""
        dq, dk, dv = (torch.full_like(x, math.nan) if poison else torch.empty_like(x) for x in self.inputs)
        self.point(dq=dq, dk=dk, dv=dv)
        flashback.check(self.lib, self.lib.fb_backward(self.plan, self.io))
        return dq, dk, dv

    def extra_bytes(self):
        """Outputs of both passes and the workspace."""
        q, k, v = self.inputs
        lse = 4 * q.shape[0] * q.shape[1] * q.shape[2]
        out = q.element_size() * q.shape[0] * q.shape[1] * q.shape[2] * v.shape[3]
        return out + lse + sum(x.numel() * x.element_size() for x in (q, k, v)) + self.io.workspace_size


class Autograd:
    """A side whose backward is PyTorch's; the graph of the last forward stays for the next backward."""

    def __init__(self, case, q, k, v, dout):
        self.causal, self.dout, self.out = case.causal, dout, None
        self.grouped = case.heads != case.heads_kv
        self.inputs = tuple(x.detach().requires_grad_() for x in (q, k, v))

    def close(self):
        self.out = None

    def context(self):
        return contextlib.nullcontext()

    def forward(self):
        self.out = self.compute(*self.inputs)
        return self.out

    def backward(self):
        return torch.autograd.grad(self.out, self.inputs, self.dout, retain_graph=True)

    def extra_bytes(self):
        """The most that is allocated at a time for both passes, beyond q, k, v and dout."""
        self.out = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with self.context():
            self.forward()
            gradients = self.backward()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        self.out = gradients = None
        return peak


class Sdpa(Autograd):
    """torch.nn.functional.scaled_dot_product_attention with one of its kernels."""

    backend = None

    def context(self):
        return sdpa_kernel(self.backend)

    def compute(self, q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, enable_gqa=self.grouped
        )


class FlashAttention2(Sdpa):
    backend = SDPBackend.FLASH_ATTENTION


class Cudnn(Sdpa):
    backend = SDPBackend.CUDNN_ATTENTION


class Unfused(Autograd):
    """Product, mask, softmax, product, each a kernel; softmax in f32."""

    def compute(self, q, k, v):
        if self.grouped:
            repeats = q.shape[1] // k.shape[1]
            k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
        scores = torch.matmul(q, k.transpose(2, 3)) * (1 / math.sqrt(q.shape[3]))
        if self.causal:
            later = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu_(1)
            scores = scores.masked_fill(later, -math.inf)
        return torch.matmul(torch.softmax(scores, 3, dtype=torch.float32).to(q.dtype), v)


class FlashAttention3(Autograd):
    """The module flash_attn_interface, which takes [B, L, H, D]."""

    def __init__(self, case, q, k, v, dout):
        from flash_attn_interface import flash_attn_func

        self.function = flash_attn_func
        rows_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, dout)]
        super().__init__(case, *rows_first)

    def compute(self, q, k, v):
        out = self.function(*(x.transpose(1, 2) for x in (q, k, v)), causal=self.causal)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


def results_of(side, **poison):
    """Both passes once, by name."""
    return dict(zip(RESULTS, (side.forward(**poison).detach(), *side.backward(**poison))))


def difference(ours, theirs):
    """The largest root mean square of a difference, over that of the tensor; NaN if there is one."""
    square = lambda x: x.float().square_().mean().item()
    found = [math.sqrt(square(ours[n] - theirs[n]) / max(square(theirs[n]), 1e-30)) for n in RESULTS]
    return math.nan if any(map(math.isnan, found)) else max(found)


PEERS = {"fa2": FlashAttention2, "cudnn": Cudnn, "fa3": FlashAttention3, "unfused": Unfused}


def exact_head(q, k, v, dout, causal):
    """out, dq, dk, dv of one query head, [L, D] in float64: the formulas of flashback.h."""
    scale = 1 / math.sqrt(q.shape[1])
    p = (q @ k.T).mul_(scale)
    if causal:
        p.masked_fill_(torch.ones(p.shape, dtype=torch.bool, device=p.device).triu_(1), -math.inf)
    p.sub_(torch.logsumexp(p, 1, keepdim=True)).exp_()
    out, dv = p @ v, p.T @ dout
    ds = (dout @ v.T).sub_((dout * out).sum(1, keepdim=True)).mul_(p).mul_(scale)
    return {"out": out, "dq": ds @ k, "dk": ds.T @ q, "dv": dv}


def errors(found, case, q, k, v, dout):
    """{side: {tensor: (largest, root mean square)}} of found = {side: {"out": ..., "dq": ..., "dk": ..., "dv": ...}},
    head by head of k and v, so that float64 takes the memory of one."""
    worst = {(side, name): 0.0 for side in found for name in RESULTS}
    square = dict(worst)
    group = case.heads // case.heads_kv
    for b in range(case.batch):
        for h in range(case.heads_kv):
            heads = slice(h * group, (h + 1) * group)
            exact = [exact_head(q[b, i].double(), k[b, h].double(), v[b, h].double(), dout[b, i].double(), case.causal)
                     for i in range(heads.start, heads.stop)]  # fmt: skip
            want = {name: torch.stack([e[name] for e in exact]) for name in ("out", "dq")}
            want |= {name: sum(e[name] for e in exact).unsqueeze(0) for name in ("dk", "dv")}
            for side, name in worst:
                here = heads if name in ("out", "dq") else slice(h, h + 1)
                error = (found[side][name][b, here].double() - want[name]).abs_()
                largest = error.max().item()  # NaN if any is, which Python's max might drop
                worst[side, name] = largest if math.isnan(largest) else max(worst[side, name], largest)
                square[side, name] += error.square_().sum().item()
    count = {name: (q if name in ("out", "dq") else k).numel() for name in RESULTS}
    return {
        side: {name: (worst[side, name], math.sqrt(square[side, name] / count[name])) for name in RESULTS}
        for side in found
    }
