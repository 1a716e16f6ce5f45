"""Hugging Face's models: `register()`, then attn_implementation="fb_attention".

    name = flashback_attention.transformers.register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation=name)

The name is not "flashback", since transformers takes every name with "flash" in it for flash-attention's package.

A model describes its mask by a function of cells, which is recognised where it is causal, a sliding window, both for
packed sequences, or plain; padding adds to it. A `Mask` carries that to the attention, as options and not as cells.
What is not recognised becomes the boolean mask [B,1,Lq,Lk] that "sdpa" has. So every model computes what "eager" does,
with two differences: a query that may see nothing gives 0, and dropout is refused.
"""

import typing

import torch

from . import attention

NAME = "fb_attention"

__all__ = ["NAME", "Mask", "attention_forward", "attention_mask", "register"]


class Mask:
    """Which cells count, as options of `attention`; what `attention_mask` makes of a mask that it recognises.

    left, right: the window, -1 for unbounded; offset: position of the first query, keys counting from 0; keys: boolean
    [B,1,1,Lk] or None, False for padding that is not at the end; lens: int32 [B] or None, how many keys count; cu:
    int32 or None, where packed sequences begin, over all batch entries; longest: the longest of them.
    """

    ndim = 4

    def __init__(self, shape, left, right, offset=0, keys=None, lens=None, cu=None, longest=0):
        self.shape, self.left, self.right, self.offset = shape, left, right, offset
        self.keys, self.lens, self.cu, self.longest = keys, lens, cu, longest

    def to(self, device, **how):
        """The mask on another device: what accelerate asks of arguments when layers lie on several."""
        keys, lens, cu = (x if x is None else x.to(device, **how) for x in (self.keys, self.lens, self.cu))
        return Mask(self.shape, self.left, self.right, self.offset, keys, lens, cu, self.longest)

    def __repr__(self):
        used = [n for n in ("keys", "lens", "cu") if getattr(self, n) is not None]
        return f"Mask({list(self.shape)}, window ({self.left}, {self.right}), offset {self.offset}, {used})"


# ---- From a function of cells to a Mask ----


class _Pattern(typing.NamedTuple):
    left: int = -1
    right: int = -1
    sequences: typing.Optional[torch.Tensor] = None  # [B,L], equal numbers are one packed sequence
    remapped: bool = False  # positions begin anew in every packed sequence


def _cells(function):
    """What a nested function of transformers.masking_utils has captured, by name."""
    names = function.__code__.co_freevars
    return dict(zip(names, (cell.cell_contents for cell in function.__closure__ or ())))


def _narrower(a, b):
    return max(a, b) if min(a, b) < 0 else min(a, b)


def _both(a, b):
    """The intersection of two patterns, or None."""
    if a is None or b is None or (a.sequences is not None and b.sequences is not None):
        return None
    sequences = a.sequences if b.sequences is None else b.sequences
    return _Pattern(_narrower(a.left, b.left), _narrower(a.right, b.right), sequences, a.remapped or b.remapped)


def _recognise(function):
    """The _Pattern that a mask function is, or None. Functions are told by the place in transformers.masking_utils that
    makes them; anything else is not recognised. A trace cannot look into nested ones."""
    from transformers import masking_utils

    if function is masking_utils.causal_mask_function:
        return _Pattern(right=0)
    if function is getattr(masking_utils, "bidirectional_mask_function", None):
        return _Pattern()
    if _tracing() or getattr(function, "__module__", None) != masking_utils.__name__:
        return None
    maker, held = function.__qualname__.partition(".")[0], _cells(function)
    if maker == "and_masks":
        found = _Pattern()
        for part in held["mask_functions"]:
            found = _both(found, _recognise(part))
        return found
    if maker == "sliding_window_overlay":
        return _Pattern(left=held["sliding_window"] - 1)
    if maker == "sliding_window_bidirectional_overlay":
        return _Pattern(left=held["sliding_window"], right=held["sliding_window"])
    if maker == "packed_sequence_mask_function":
        return _Pattern(sequences=held["packed_sequence_mask"])
    if maker == "remap_positions_for_packed_sequence":
        found = _recognise(held["mask_function"])
        return None if found is None or found.sequences is not None else found._replace(remapped=True)
    return None


def _padding(mask, kv_length, kv_offset):
    """(keys, lens) of a padding mask [B, seen]: lens where all padding is at the end."""
    if mask is None:
        return None, None
    mask = mask[:, kv_offset : kv_offset + kv_length]
    mask = torch.nn.functional.pad(mask, (0, kv_length - mask.shape[1]))
    if _tracing():
        return mask[:, None, None], None
    if mask.all():
        return None, None
    if bool((mask[:, :-1] >= mask[:, 1:]).all()):
        return None, mask.sum(-1, dtype=torch.int32)
    return mask[:, None, None], None


def _boundaries(sequences):
    """(cu, longest) of packed sequences in every row of [B,L]."""
    first = torch.ones_like(sequences, dtype=torch.bool)
    first[:, 1:] = sequences[:, 1:] != sequences[:, :-1]
    starts = first.flatten().nonzero().flatten()
    cu = torch.cat([starts, starts.new_tensor([sequences.numel()])]).to(torch.int32)
    return cu, int((cu[1:] - cu[:-1]).max())


def attention_mask(batch_size, q_length=None, kv_length=None, q_offset=0, kv_offset=0, mask_function=None,
                   attention_mask=None, **more):  # fmt: skip
    """What AttentionMaskInterface asks for: a Mask, or the boolean mask [B,1,Lq,Lk] of "sdpa" for what is not
    recognised. While a graph is traced nothing may depend on what a tensor holds: windows, and packed sequences, which
    every model then has unless it is given a padding mask, become masks of cells."""
    from transformers import masking_utils

    if isinstance(attention_mask, Mask):
        return attention_mask
    mask_function = mask_function or masking_utils.causal_mask_function
    queries = {"q_length": q_length, "q_offset": q_offset}
    if "cache_position" in more:  # transformers 4 gives the positions of all queries instead
        queries = {"cache_position": more.pop("cache_position")}
        q_length, q_offset = queries["cache_position"].shape[0], queries["cache_position"][0]
    pattern = _recognise(mask_function)
    packed = pattern is not None and pattern.sequences is not None
    # Positions that begin anew are those of packed sequences, or of something else; and packed ones have no past.
    odd = (attention_mask is not None or q_offset or kv_offset) if packed else pattern is None or pattern.remapped
    unknown = isinstance(q_offset, torch.Tensor) and _tracing()
    if unknown or odd:
        more.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        return masking_utils.sdpa_mask(batch_size=batch_size, kv_length=kv_length, kv_offset=kv_offset,
                                       mask_function=mask_function, attention_mask=attention_mask, **queries,
                                       **more)  # fmt: skip
    shape = torch.Size((batch_size, 1, q_length, kv_length))
    if packed:
        return Mask(shape, pattern.left, pattern.right, 0, None, None, *_boundaries(pattern.sequences))
    keys, lens = _padding(attention_mask, kv_length, kv_offset)
    return Mask(shape, pattern.left, pattern.right, int(q_offset) - int(kv_offset), keys, lens)


def _tracing():
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


# ---- The attention of a layer ----


def _packed(query, key, value, cu_q, cu_k, longest, options):
    """Sequences that lie end to end in [B,H,L,D], over all batch entries."""
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out = attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=longest[0], max_seqlen_k=longest[1],
                    **options)  # fmt: skip
    return out.unflatten(0, (query.shape[0], query.shape[2]))


def _refuse(dropout, more):
    if dropout:
        raise ValueError(
            f"dropout is {dropout}, expected 0: flashback has no dropout of attention weights. Set attention_dropout "
            "(attention_probs_dropout_prob) to 0 in the model's config, or take another attn_implementation"
        )
    if more.get("output_attentions"):
        raise ValueError("output_attentions is True, but flashback never makes attention weights; eager does")
    if more.get("head_mask") is not None:
        raise ValueError("head_mask is given; flashback does not scale attention weights, eager does")


def attention_forward(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None,
                      softcap=None, s_aux=None, position_bias=None, **more):  # fmt: skip
    """What AttentionInterface asks for: (out [B,Lq,Hq,Dv], None) from query [B,Hq,Lq,D], key [B,Hkv,Lk,D] and value
    [B,Hkv,Lk,Dv]. A window is in the mask; the number that a layer names besides is not looked at."""
    _refuse(dropout, more)
    options = {"scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux}
    if position_bias is not None:
        options["bias"] = position_bias.to(query.dtype)
    cu_q, cu_k = more.get("cu_seq_lens_q"), more.get("cu_seq_lens_k")
    if isinstance(attention_mask, Mask):
        options["window"] = attention_mask.left, attention_mask.right
        if attention_mask.cu is not None:
            cu, longest = attention_mask.cu, attention_mask.longest
            return _packed(query, key, value, cu, cu, (longest, longest), options), None
        if cu_q is not None:
            longest = more.get("max_length_q"), more.get("max_length_k")
            return _packed(query, key, value, cu_q, cu_k, longest, options), None
        options["alignment"], options["position_offset"] = "top_left", attention_mask.offset
        options["mask"], options["lens_k"] = attention_mask.keys, attention_mask.lens
    elif attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        options["causal"], options["alignment"] = bool(causal and query.shape[2] > 1), "top_left"
    elif attention_mask.dtype == torch.bool:
        options["mask"] = attention_mask
    elif position_bias is None:
        options["bias"] = attention_mask.to(query.dtype)
    else:
        options["bias"] = options["bias"] + attention_mask.to(query.dtype)
    return attention(query, key, value, **options).transpose(1, 2), None


def register(name: str = NAME) -> str:
    """Makes `name` an attn_implementation of transformers, with its own masks, and returns it. Needs transformers with
    AttentionMaskInterface (4.53 and later); calling it again is fine.

    Raises: ImportError if there is no such transformers. ValueError if transformers takes the name for that of
    flash-attention, which it then looks for and masks for.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(f"flashback_attention.transformers needs transformers 4.53 or later: {error}") from error
    if "flash" in name:
        raise ValueError(
            f"name is {name!r}, but transformers takes names with 'flash' in them for flash-attention's; {NAME!r} works"
        )
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)
    return name
