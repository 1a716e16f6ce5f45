"""The problems of gpu.py and what is to be reached there: as ratios to the best peer of the row, and as rates of an
H200. Knows neither library."""

from dataclasses import dataclass

import targets


@dataclass(frozen=True)
class Case:
    """One self-attention problem: q, dout, out are [batch, heads, length, dim], k and v have heads_kv."""

    group: str  # the set that it belongs to
    dtype: str  # "bf16", "f16"
    batch: int
    heads: int
    heads_kv: int
    length: int
    dim: int
    causal: bool

    @property
    def mask(self):
        return "causal" if self.causal else "dense"

    def name(self, direction):
        """As --filter sees it; direction is fwd, bwd or both."""
        heads = f"b{self.batch}h{self.heads}k{self.heads_kv}"
        return f"{self.dtype}.{heads}.l{self.length}.d{self.dim}.{self.mask}.{direction}"

    def flops(self, direction):
        """4 B Hq L L D forward, 2.5 times that backward, half of either when causal."""
        full = 4 * self.batch * self.heads * self.length**2 * self.dim
        return full * {"fwd": 1, "bwd": 2.5, "both": 3.5}[direction] / (2 if self.causal else 1)

    def score_bytes(self):
        """One matrix of scores in 16 bits, of which the unfused formula keeps several."""
        return 2 * self.batch * self.heads * self.length**2


def hopper():
    """16384 tokens, as many operations for every head dimension."""
    lengths = (512, 1024, 2048, 4096, 8192, 16384)
    for dim, heads in ((64, 32), (128, 16), (256, 8)):
        for causal in (False, True):
            for length in lengths:
                yield Case("hopper", "bf16", 16384 // length, heads, heads, length, dim, causal)
    for length in (4096, 8192):
        yield Case("hopper", "bf16", 16384 // length, 32, 8, length, 128, True)


def original():
    """The table of the work that flashback descends from."""
    for causal in (True, False):
        for dim in (64, 96, 128):
            for length in (512, 1024, 2048, 4096):
                yield Case("original", "f16", 1, 32, 32, length, dim, causal)
    yield Case("original", "f16", 1, 32, 8, 2048, 128, True)


SETS = {"hopper": (hopper,), "original": (original,), "all": (original, hopper)}


def cases(name):
    return [case for group in SETS[name] for case in group()]


def ratio(case, direction):
    """(must, stretch) for the best fused peer's time over flashback's; None where nothing is asked."""
    if case.group == "original":
        return (1, 1.2) if direction == "both" else None
    if case.length <= 1024:
        return (1.2, 1.5) if direction == "both" else None
    if direction == "fwd":
        return (0.97, 1)
    return (1, 1.1) if direction == "bwd" and case.length >= 4096 else None


# By head dimension: dense, causal. Of 16384 keys.
FORWARD = {64: (620, None), 128: (730, None), 256: (775, None)}
BACKWARD = {64: (545, 550), 128: (620, 570), 256: (470, 440)}
BACKWARD_STRETCH = {64: (640, 630), 128: (700, 680), 256: (560, 540)}


def rate(case, direction):
    """(must, stretch) in TFLOP/s on an H200, either None; None where nothing is asked."""
    if case.group != "hopper":
        return None
    if case.heads_kv != case.heads:
        return (560, 650) if direction == "bwd" and case.length == 8192 else None
    if case.length != 16384 or direction == "both":
        return None
    if direction == "bwd":
        return BACKWARD[case.dim][case.causal], BACKWARD_STRETCH[case.dim][case.causal]
    stretch = FORWARD[case.dim][case.causal]
    return (None, stretch) if stretch else None


def verdict(case, direction, found_ratio, found_rate, with_rate):
    """The worse of what ratio and rate come to: "stretch", "must", "no"; "-" where nothing is asked. Rates are an
    H200's, so they count only there."""
    order = ("no", "must", "stretch")
    met = [targets.verdict(found_ratio, ratio(case, direction))]
    asked = rate(case, direction) if with_rate else None
    if asked:
        must, stretch = asked
        reached = stretch is not None and found_rate >= stretch
        met.append("stretch" if reached else "must" if must is None or found_rate >= must else "no")
    met = [m for m in met if m != "-"]
    return min(met, key=order.index) if met else "-"
