"""The keywords of `attention` as one object, checked for what a descriptor of the library could not hold."""

import numbers
import typing

from ._abi import UNBOUNDED
from ._plan import Options

ROUTES = ("auto", "fused", "vector", "unfused", "reference")
LAYOUTS = ("bhld", "blhd")
ALIGNMENTS = ("bottom_right", "top_left")


class BlockMask(typing.NamedTuple):
    """Which blocks of cells count. `mask` is boolean, [B|1, Hq|1, ceil(Lq/block_q), ceil(Lk/block_k)], contiguous;
    False: no cell of that block counts. Blocks have block_q queries and block_k keys, multiples of 16."""

    mask: typing.Any
    block_q: int = 64
    block_k: int = 64


class Arguments(typing.NamedTuple):
    """See `attention` for what they mean."""

    causal: bool = False
    window: typing.Optional[tuple] = None
    scale: typing.Optional[float] = None
    softcap: float = 0.0
    bias: typing.Any = None
    mask: typing.Any = None
    block_mask: typing.Optional[BlockMask] = None
    sinks: typing.Any = None
    cu_seqlens_q: typing.Any = None
    cu_seqlens_k: typing.Any = None
    alignment: str = "bottom_right"
    deterministic: typing.Optional[bool] = None
    route: str = "auto"
    layout: str = "bhld"
    lens_q: typing.Any = None
    lens_k: typing.Any = None
    position_offset: int = 0
    max_seqlen_q: typing.Optional[int] = None
    max_seqlen_k: typing.Optional[int] = None

    @property
    def packed(self):
        return self.cu_seqlens_q is not None or self.cu_seqlens_k is not None

    def operands(self, q, k, v):
        """The arrays in the order of _plan.OPERANDS, None for what is not used."""
        block = None if self.block_mask is None else self.block_mask[0]
        cu = self.cu_seqlens_q, self.cu_seqlens_k
        return q, k, v, self.bias, self.mask, block, self.sinks, *cu, self.lens_q, self.lens_k

    def options(self, deterministic, longest=(0, 0)):
        """The numbers. `longest` has the longest query and key sequence of a packed batch."""
        left, right = _window(self.causal, self.window)
        _word("alignment", self.alignment, ALIGNMENTS)
        _word("route", self.route, ROUTES)
        block_q, block_k = (0, 0) if self.block_mask is None else _blocks(self.block_mask)
        offset = _whole("position_offset", self.position_offset)
        return Options(
            left,
            right,
            self.alignment == "top_left",
            offset,
            None if self.scale is None else _number("scale", self.scale, "None asks for 1/sqrt(head_dim)"),
            _number("softcap", self.softcap, "0 means none"),
            block_q,
            block_k,
            longest[0],
            longest[1],
            bool(deterministic),
            self.route,
        )

    def check(self):
        """What has to be right before operands are looked at."""
        _word("layout", self.layout, LAYOUTS)
        if self.block_mask is not None and (not isinstance(self.block_mask, tuple) or len(self.block_mask) != 3):
            raise TypeError(
                f"block_mask is of type {type(self.block_mask).__name__}, expected BlockMask(mask, block_q, block_k)"
            )
        for name in ("max_seqlen_q", "max_seqlen_k"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name))


def _symbolic(x):
    """A number that PyTorch's compiler has not fixed."""
    return type(x).__name__ == "SymInt"


def _is_whole(x):
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def _window(causal, window):
    """(left, right), -1 for unbounded."""
    if window is None:
        return -1, 0 if causal else -1
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(
            f"window is {window!r}, expected a pair (left, right) of distances; a sliding window of W keys that counts "
            "the query itself is (W - 1, 0)"
        )
    ends = []
    for side, x in zip(("left", "right"), window):
        if x is None or _symbolic(x):
            ends.append(-1 if x is None else x)
            continue
        if not _is_whole(x):
            raise TypeError(f"window's {side} is {x!r}, expected a whole number, or None for unbounded")
        if x < -1:
            raise ValueError(f"window's {side} is {x}, expected 0 or more, or None or -1 for unbounded")
        ends.append(min(int(x), UNBOUNDED))
    return ends[0], 0 if causal else ends[1]


def _number(name, value, hint):
    if type(value) is float and value == value:
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r}, expected a number; {hint}")
    if value != value:
        raise ValueError(f"{name} is NaN, expected a finite number; {hint}")
    return float(value)


def _whole(name, value):
    if type(value) is int and value == 0 or _symbolic(value):
        return value
    if not _is_whole(value):
        raise TypeError(f"{name} is {value!r}, expected a whole number")
    if not -(2**62) < value < 2**62:
        raise ValueError(f"{name} is {value}, expected at most 2^62 in size")
    return int(value)


def _blocks(block_mask):
    return tuple(_whole("block_mask's " + n, x) for n, x in zip(("block_q", "block_k"), block_mask[1:]))


def _word(name, value, words):
    if value not in words:
        raise ValueError(f"{name} is {value!r}, expected one of: {', '.join(words)}")
