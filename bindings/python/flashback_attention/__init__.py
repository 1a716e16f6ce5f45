"""flashback: exact attention for training, forward and backward, in O(L) memory.

    out = flashback_attention.attention(q, k, v, causal=True)      # NumPy, PyTorch, or anything with DLPack

`attention` is differentiable for PyTorch's tensors; `attention_vjp` gives gradients of other arrays. `explain` and
`supported` say what a call would do and why not. `flashback_attention.transformers.register()` gives it to Hugging
Face's models, `replace_sdpa()` to whatever calls PyTorch's scaled_dot_product_attention.
"""

import sys

from . import _library
from ._api import Gradients, attention, attention_vjp, clear_plans, explain, info, supported
from ._arguments import BlockMask
from ._arrays import Tensor
from ._library import NoDevice, Unsupported
from ._sdpa import replace_sdpa

if sys.modules.get("torch"):  # otherwise with the first tensor; imported here it is no part of a graph that is traced
    from . import _torch  # noqa: F401

__version__ = _library.lib.fb_version().decode()
__all__ = [
    "BlockMask", "Gradients", "NoDevice", "Tensor", "Unsupported", "attention", "attention_vjp", "clear_plans",
    "explain", "get_library", "info", "replace_sdpa", "supported",
]  # fmt: skip


def get_library() -> str:
    """Path of the shared library that is loaded, for programs that use its C interface."""
    return str(_library.path)
