"""What flashback is to reach beside PyTorch, as ratios: time there / time here, and error here / error there. Read by
peers.py; knows neither library."""

import os
import pathlib
from dataclasses import dataclass

ISAS = ("amx", "amx_model", "avx512bf16", "avx512", "avx2", "bfdot", "baseline", "scalar")  # values of FLASHBACK_ISA, best first
LONG = 2048  # keys


@dataclass(frozen=True)
class Case:
    """One self-attention problem: q, k, v, out and their gradients are [batch, heads, length, dim]."""

    dtype: str  # "f32", "bf16", "f16"
    dim: int
    length: int
    heads: int
    batch: int
    causal: bool

    @property
    def mask(self):
        return "causal" if self.causal else "dense"

    @property
    def shape(self):
        return f"b{self.batch}h{self.heads}.l{self.length}.d{self.dim}"

    def name(self, backward):
        return f"{self.dtype}.{self.shape}.{self.mask}.{'bwd' if backward else 'fwd'}"

    def flops(self, backward):
        """Operations of one call: 4 B H L L D forward, 2.5 times that backward, half of either when causal."""
        full = 4 * self.batch * self.heads * self.length**2 * self.dim
        return full * (2.5 if backward else 1) / (2 if self.causal else 1)


def processor_flags():
    """Words of the "flags" line of this machine's first processor."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), ()))


def matrix_class(flags=None, cap=None):
    """Which instructions for 16-bit products flashback may use: "amx", "avx512bf16" or "none". `cap` stands for
    FLASHBACK_ISA."""
    flags = processor_flags() if flags is None else flags
    cap = os.environ.get("FLASHBACK_ISA", "") if cap is None else cap
    allowed = ISAS[ISAS.index(cap) :] if cap in ISAS else ISAS
    if "amx_bf16" in flags and "amx" in allowed:
        return "amx"
    return "avx512bf16" if "avx512_bf16" in flags and "avx512bf16" in allowed else "none"


def has_f16_matrices(flags=None, cap=None):
    """Does AMX multiply f16, and may flashback use it?"""
    flags = processor_flags() if flags is None else flags
    return "amx_fp16" in flags and matrix_class(flags, cap) == "amx"


def speed(case, backward, matrices, f16_matrices=False):
    """(must, stretch) for PyTorch's time over flashback's; None where nothing is asked. `matrices` is
    matrix_class()."""
    few = case.batch * case.heads <= 8
    if case.dtype == "f32":
        if backward:
            return (2, 3.5) if few or case.causal else (1.1, 1.8)
        if case.causal:
            return (1.5, 2.3) if case.length >= LONG else (1.9, 3)
        return (1.1, 1.9) if case.length >= LONG else None
    if case.dtype == "bf16" and matrices == "amx":
        if backward:
            return (8, 20) if few else (5, 10)
        return (2.5, 5) if case.causal else (2, 5)
    if case.dtype == "bf16" and matrices == "avx512bf16":
        return (2.5, 5) if backward else (1.5, 2.5)
    if case.dtype == "f16" and not f16_matrices:
        return (2, 4)
    return None


def accuracy(case, tensor):
    """(must, stretch) for flashback's error over PyTorch's, at most; None where nothing is asked."""
    return (0.5, 0.25) if case.dtype == "bf16" and case.length >= LONG and tensor != "out" else None


def verdict(found, target, at_most=False):
    """"stretch", "must" or "no"; "-" without a target."""
    if target is None:
        return "-"
    must, stretch = target
    better = (lambda x: found <= x) if at_most else (lambda x: found >= x)
    return "stretch" if better(stretch) else "must" if better(must) else "no"
