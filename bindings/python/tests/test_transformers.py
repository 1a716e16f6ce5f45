"""Hugging Face's models, tiny and with random weights: 20 steps of training beside `eager`, padding, packed sequences,
and what arrives as options instead of as a mask of cells."""

import copy

import pytest

torch = pytest.importorskip("torch", reason="needs the package torch")
tf = pytest.importorskip("transformers", minversion="4.53", reason="needs the package transformers, 4.53 or later")
import flashback_attention.transformers as hf  # noqa: E402

IMPLEMENTATION = hf.register()
V5 = int(tf.__version__.split(".")[0]) >= 5
needs_v5 = pytest.mark.skipif(not V5, reason="needs transformers 5, where BERT has an attention interface")
TOKENS, LENGTH, BATCH, STEPS = 61, 24, 3, 20
pytestmark = pytest.mark.usefixtures("one_thread")  # the models are tiny
tf.logging.set_verbosity_error()


def base(**more):
    sizes = dict(vocab_size=TOKENS, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=64, attention_dropout=0.0, use_cache=False)  # fmt: skip
    return {**sizes, **more}


WINDOW = {"sliding_window": 7}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
CONFIGS = {
    "Llama": lambda: tf.LlamaConfig(**base()),
    "Qwen2": lambda: tf.Qwen2Config(**base()),
    "Mistral": lambda: tf.MistralConfig(**base(**WINDOW)),
    "Gemma 2": lambda: tf.Gemma2Config(
        **base(head_dim=8, query_pre_attn_scalar=16, attn_logit_softcapping=2.0, **WINDOW, **LAYERS)),
    "Gemma 3": lambda: tf.Gemma3TextConfig(**base(head_dim=8, **WINDOW, **LAYERS)),
    "gpt-oss": lambda: tf.GptOssConfig(
        **base(head_dim=8, num_local_experts=2, num_experts_per_tok=2, **WINDOW, **LAYERS)),
    "Phi-3": lambda: tf.Phi3Config(  # head dimension 96
        **base(hidden_size=192, num_attention_heads=2, num_key_value_heads=1, pad_token_id=0, **WINDOW)),
    "BERT": lambda: tf.BertConfig(**{**base(), "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
}  # fmt: skip
NAMES = [pytest.param(name, marks=needs_v5) if name == "BERT" else name for name in CONFIGS]


def build(name, implementation, device="cpu", dtype=torch.float32):
    """A model whose random weights are the same for each implementation. The config is a copy: a model writes into
    it."""
    torch.manual_seed(7)
    auto = tf.AutoModelForMaskedLM if name == "BERT" else tf.AutoModelForCausalLM
    model = auto.from_config(copy.deepcopy(CONFIGS[name]()), attn_implementation=implementation)
    assert model.config._attn_implementation == implementation
    return model.to(device=device, dtype=dtype).train()


def batch_of(rng, device="cpu", padding=None):
    """Token ids, labels and a padding mask, None, "right" or "left". No label depends on a query in the padding."""
    ids = torch.tensor(rng.integers(1, TOKENS, (BATCH, LENGTH)), device=device)
    if padding is None:
        return {"input_ids": ids, "labels": ids}
    mask = torch.ones_like(ids)
    labels = ids.clone()
    if padding == "right":
        mask[1, -9:] = 0
    else:
        mask[1, :9] = 0
        labels[1, 9] = -100  # predicted from the last token of the padding
    return {"input_ids": ids, "labels": labels.masked_fill(mask == 0, -100), "attention_mask": mask}


def step(model, batch):
    """Loss, and every gradient by name."""
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}


def relative(got, want, largest):
    """Difference of two gradients beside their size, or beside a thousandth of the largest gradient's: keys have a bias
    in some models, whose gradient is 0 but for rounding."""
    return float((got - want).double().norm() / max(want.double().norm(), 1e-3 * largest, 1e-12))


def differences(got, want):
    assert got.keys() == want.keys() and len(want) > 10
    largest = max(g.double().norm() for g in want.values())
    return {n: relative(got[n], want[n], float(largest)) for n in want}


@pytest.mark.parametrize("name", NAMES)
def test_training(rng, device, name):
    """20 steps of AdamW: the loss and every gradient agree with eager's to 1e-4 in each."""
    models = [build(name, x, device) for x in ("eager", IMPLEMENTATION)]
    steps = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in models]
    losses = []
    for n in range(STEPS):
        batch = batch_of(rng, device, (None, "right", "left")[n % 3])
        (want_loss, want), (loss, got) = (step(m, batch) for m in models)
        found = differences(got, want)
        worst = max(found, key=found.get)
        assert abs(loss - want_loss) <= 1e-4 * want_loss and found[worst] < 1e-4, (n, worst, found[worst])
        losses.append(float(loss))
        for optimizer in steps:
            optimizer.step()
        # The same weights before each step: what is compared is attention, not how errors grow in 20 steps.
        models[1].load_state_dict(models[0].state_dict())
    assert losses[-1] != losses[0]


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16(rng, device, name):
    """In bf16 the error against f32 is at most twice eager's: of the loss, and of all gradients together."""
    batch, errors = batch_of(rng, device), {}
    exact = step(build(name, "eager", device, torch.bfloat16).float(), batch)  # f32 with bf16's weights
    for implementation in ("eager", IMPLEMENTATION):
        loss, found = step(build(name, implementation, device, torch.bfloat16), batch)
        errors[implementation] = [
            float(torch.stack([(found[n].float() - exact[1][n]).norm() for n in exact[1]]).norm()),
            abs(float(loss - exact[0])),
        ]
    (eager, eager_loss), (ours, our_loss) = errors["eager"], errors[IMPLEMENTATION]
    assert ours <= 2 * eager and our_loss <= 2 * eager_loss + 2e-3 * float(exact[0]), errors


class Spy:
    """The options that layers call the attention with."""

    def __init__(self, monkeypatch):
        self.calls, attention = [], hf.attention
        monkeypatch.setattr(hf, "attention", lambda *a, **k: (self.calls.append(k), attention(*a, **k))[1])


@pytest.mark.parametrize("name, padding, windows", [
    ("Llama", None, [(-1, 0)] * 2), ("Mistral", "right", [(6, 0)] * 2), ("Gemma 2", "left", [(6, 0), (-1, 0)]),
    ("gpt-oss", None, [(6, 0), (-1, 0)]), pytest.param("BERT", "right", [(-1, -1)] * 2, marks=needs_v5)])  # fmt: skip
def test_options_instead_of_masks(rng, monkeypatch, name, padding, windows):
    """Windows, softcap, sinks and padding arrive as options; nothing of size Lq x Lk is made."""
    spy = Spy(monkeypatch)
    build(name, IMPLEMENTATION)(**batch_of(rng, padding=padding))
    assert [call["window"] for call in spy.calls] == windows
    for call in spy.calls:
        assert call.get("bias") is None
        lens, mask = call.get("lens_k"), call.get("mask")
        assert (lens is not None) == (padding == "right") and (mask is not None) == (padding == "left")
        assert lens is None or lens.tolist() == [LENGTH, LENGTH - 9, LENGTH]
        assert mask is None or mask.shape == (BATCH, 1, 1, LENGTH)
        assert call["softcap"] == (2.0 if name == "Gemma 2" else 0.0)
        assert (call["sinks"] is not None) == (name == "gpt-oss")


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma 3"])
def test_packed_sequences(rng, monkeypatch, name):
    """Position ids that begin anew become packed sequences, in several rows, and give what eager gives."""
    ids = torch.tensor(rng.integers(1, TOKENS, (2, 12)))
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6], [*range(9), 0, 1, 2]])
    want = build(name, "eager")(input_ids=ids, position_ids=positions).logits
    spy = Spy(monkeypatch)
    got = build(name, IMPLEMENTATION)(input_ids=ids, position_ids=positions).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert [call["cu_seqlens_q"].tolist() for call in spy.calls] == [[0, 5, 12, 21, 24]] * 2
    assert spy.calls[0]["max_seqlen_q"] == 9 and spy.calls[0].get("mask") is None


def test_boundaries_from_a_collator(rng, monkeypatch):
    """cu_seq_lens in the arguments of a model, as data collators without padding give them."""
    ids = torch.tensor(rng.integers(1, TOKENS, (1, 12)))
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    model = build("Llama", IMPLEMENTATION)
    want = model(input_ids=ids, position_ids=positions).logits
    spy = Spy(monkeypatch)
    boundaries = dict(cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=7, max_length_k=7)
    got = model(input_ids=ids, position_ids=positions, **boundaries).logits
    assert torch.equal(got, want) and spy.calls[0]["cu_seqlens_q"].tolist() == [0, 5, 12]


def test_generation(rng):
    """Decoding with a cache gives the tokens of eager."""
    ids = torch.tensor(rng.integers(1, TOKENS, (2, 9)))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    for name in ("Llama", "Mistral", "gpt-oss"):
        found = []
        for implementation in ("eager", IMPLEMENTATION):
            model = build(name, implementation).eval()
            model.config.use_cache = True
            found.append(model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=12, do_sample=False))
        assert torch.equal(*found), name


def test_a_mask_of_cells_that_nobody_knows(rng):
    """A custom 4-dimensional mask, boolean or added, goes through as it is."""
    ids = torch.tensor(rng.integers(1, TOKENS, (2, 12)))
    keep = torch.tensor(rng.random((2, 1, 12, 12)) < 0.7) | torch.eye(12, dtype=torch.bool)
    added = torch.zeros(2, 1, 12, 12).masked_fill(~keep, torch.finfo(torch.float32).min)
    want = build("Llama", "eager")(input_ids=ids, attention_mask=added).logits
    model = build("Llama", IMPLEMENTATION)
    for mask in (keep, added):
        torch.testing.assert_close(model(input_ids=ids, attention_mask=mask).logits, want, rtol=1e-4, atol=1e-5)


def test_patterns():
    """What is recognised, and what is not and becomes a mask of cells."""
    from transformers import masking_utils as mu

    assert hf._recognise(mu.causal_mask_function) == (-1, 0, None, False)
    assert hf._recognise(mu.sliding_window_causal_mask_function(4)) == (3, 0, None, False)
    if V5:
        assert hf._recognise(mu.sliding_window_bidirectional_mask_function(4)) == (4, 4, None, False)
    unknown = (mu.or_masks(mu.causal_mask_function, mu.causal_mask_function), lambda b, h, q, k: q >= k,
               mu.chunked_causal_mask_function(4, torch.zeros(2, dtype=int)))  # fmt: skip
    for function in unknown:
        assert hf._recognise(function) is None
        size = {"q_length": 6} if V5 else {"cache_position": torch.arange(6)}
        mask = hf.attention_mask(2, kv_length=6, mask_function=function, **size)
        assert mask.shape == (2, 1, 6, 6) and mask.dtype == torch.bool and not mask.all()


@pytest.mark.parametrize("name, padding", [
    ("Llama", "right"), ("Mistral", None), pytest.param("BERT", "right", marks=needs_v5)])  # fmt: skip
def test_compiled(rng, monkeypatch, name, padding):
    """A whole model as one graph. With a padding mask causal and plain attention keep their options."""
    batch, spy = batch_of(rng, padding=padding), Spy(monkeypatch)
    model = build(name, IMPLEMENTATION)
    want = step(model, batch)
    torch._dynamo.reset()
    spy.calls.clear()
    got = step(torch.compile(model, fullgraph=True, backend="aot_eager"), batch)
    sizes = {call["mask"].shape[2] for call in spy.calls}
    assert sizes == ({1} if padding and V5 else {LENGTH})
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-6)
    names = {n.removeprefix("_orig_mod."): g for n, g in got[1].items()}
    assert max(differences(names, want[1]).values()) < 1e-4


def test_a_mask_moves(rng):
    """accelerate moves arguments by .to()."""
    from transformers import masking_utils as mu

    padding = torch.ones(2, 6, dtype=torch.bool)
    padding[1, :2] = False
    mask = hf.attention_mask(2, 6, 6, mask_function=mu.causal_mask_function, attention_mask=padding)
    moved = mask.to("meta", non_blocking=True)
    assert moved.keys.device.type == "meta" and (moved.left, moved.right, moved.shape) == (-1, 0, mask.shape)
    assert hf.attention_mask(2, 6, 6, attention_mask=mask) is mask


def test_refusals(rng):
    config = tf.LlamaConfig(**base(attention_dropout=0.1))
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation=IMPLEMENTATION).train()
    with pytest.raises(ValueError, match="dropout is 0.1, expected 0"):
        model(**batch_of(rng))
    with pytest.raises(ValueError, match="takes names with 'flash'"):
        hf.register("flashback")
