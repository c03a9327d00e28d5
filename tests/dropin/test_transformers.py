"""attn_implementation="fa4" in models built from small configurations, against "eager".

The truth is the same model with the oracle's attention, in float64, so that what is measured is
attention's own error. What is allowed follows the kit's rule: twice the largest error of plain
attention, here "eager", and a band of roundings.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import fa4
from tests.dropin.support import assert_within

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
WINDOW = GROUPED | {"sliding_window": 4, "head_dim": 8}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
CAPPED = {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 0.5}
T5 = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
# name: (configuration, model, its fields)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", "LlamaForCausalLM", GROUPED),
    "Mistral": ("MistralConfig", "MistralForCausalLM", WINDOW),
    "Gemma2": ("Gemma2Config", "Gemma2ForCausalLM", WINDOW | CAPPED),
    "GPT-OSS": ("GptOssConfig", "GptOssForCausalLM", WINDOW | EXPERTS | ROPE),
    "BERT": ("BertConfig", "BertForMaskedLM", SIZES),
    "T5": ("T5Config", "T5ForConditionalGeneration", T5 | {"decoder_start_token_id": 0}),
}
DECODERS = [name for name in MODELS if name != "BERT"]
TOKENS = torch.randint(2, 97, (3, 11), generator=torch.Generator().manual_seed(0))
PADDING = torch.ones_like(TOKENS)
PADDING[1, :3] = PADDING[2, :7] = 0  # on the left, as for generation


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """The implementations "fa4" and "fa4_oracle"; transformers' log is not ours to test."""
    fa4.transformers.register()
    fa4.transformers.register("fa4_oracle", impl="oracle")
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)


def build(name: str) -> Any:
    """A model with random weights of some size, so that attention matters."""
    config, model, fields = MODELS[name]
    torch.manual_seed(0)
    built = getattr(transformers, model)._from_config(
        getattr(transformers, config)(**fields), attn_implementation="eager"
    )
    if hasattr(built, "set_experts_implementation"):
        built.set_experts_implementation("eager")  # the other one has no float64
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
            elif parameter.shape == (4,):  # GPT-OSS's sinks
                parameter.normal_()
    return built.eval()


def step(model: Any, impl: str, dtype: Any, padded: bool) -> tuple[Any, Any]:
    """(logits of real tokens, gradients of all weights) by one implementation."""
    model.set_attn_implementation(impl)
    model.to(dtype).zero_grad()
    mask = PADDING if padded else torch.ones_like(PADDING)
    result = model(input_ids=TOKENS, attention_mask=mask if padded else None, labels=TOKENS)
    logits = result.logits[mask.bool()]
    logits.tanh().square().mean().backward()
    found = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return logits.detach(), torch.cat(found).clone()


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_forward_and_backward(name: str, padded: bool) -> None:
    """Logits and gradients in float32."""
    model = build(name)
    with mock.patch("fa4.transformers.attend", side_effect=fa4.transformers.attend) as attend:
        ours = step(model, "fa4", torch.float32, padded)
        calls = attend.call_args_list
    plain = step(model, "eager", torch.float32, padded)
    exact = step(model, "fa4_oracle", torch.float64, padded)
    size = max(x.abs().max().item() for x in (exact[0], exact[1]))
    for values in zip(ours, plain, exact, strict=True):
        assert_within(*values, size=size)
    # Without padding only a window that hides something, and T5's bias, become a mask.
    masks = [call.args[2] is not None for call in calls]
    every, first = name in ("Mistral", "T5") or padded, name in ("Gemma2", "GPT-OSS")
    assert masks == [every or first] + [every] * (5 if name == "T5" else 1)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", DECODERS)
def test_generate(name: str, padded: bool) -> None:
    """Twelve tokens with a cache: those of "eager", and the same with a static cache."""
    model = build(name)
    mask = PADDING if padded else torch.ones_like(PADDING)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found = {}
    for impl in ("eager", "fa4"):
        model.set_attn_implementation(impl)
        found[impl] = model.generate(TOKENS, attention_mask=mask, **options)
    assert found["fa4"].equal(found["eager"])
    assert found["fa4"].shape[1] >= 12 and len(found["fa4"].unique()) > 3
    if name != "T5":
        static = model.generate(
            TOKENS,
            attention_mask=mask,
            **options,
            cache_implementation="static",
            disable_compile=True,
        )
        assert static.equal(found["eager"])


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_sequences_packed_into_one_row(name: str) -> None:
    """Positions that start again separate sequences."""
    model = build(name)
    positions = torch.cat([torch.arange(4), torch.arange(7)])[None]
    logits = []
    for impl in ("eager", "fa4"):
        model.set_attn_implementation(impl)
        logits.append(model(TOKENS[:1], position_ids=positions, use_cache=False).logits)
    alone = model(TOKENS[:1, 4:], use_cache=False).logits
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits[1][:, 4:], alone, rtol=1e-4, atol=1e-4)


def attend(**options: Any) -> Any:
    """The attention function on two sequences of 3 tokens."""
    x = torch.randn(2, 4, 3, 8, generator=torch.Generator().manual_seed(0))
    module = mock.Mock(is_causal=True)
    given = {"module": module, "query": x, "key": x, "value": x, "attention_mask": None}
    return fa4.transformers.attention(**given | options)[0]


def test_offsets_of_packed_sequences() -> None:
    """cu_seq_lens_*, which a collator may give with a row that holds everything."""
    x = torch.randn(1, 4, 5, 8)
    rows = {"query": x, "key": x, "value": x}
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    out = attend(**rows, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets)
    parts = [attend(**{n: y[:, :, part] for n, y in rows.items()})
             for part in (slice(0, 2), slice(2, 5))]  # fmt: skip
    torch.testing.assert_close(out, torch.cat(parts, 1), rtol=1e-5, atol=1e-6)
    with pytest.raises(NotImplementedError, match="one row"):
        attend(cu_seq_lens_q=offsets, cu_seq_lens_k=offsets)


def test_causal_or_not() -> None:
    """The argument, else the module; one query sees every key, aligned to the bottom right."""
    first = attend()[:, 0]
    assert attend(is_causal=False)[:, 0].ne(first).any()
    assert attend(module=mock.Mock(is_causal=False)).equal(attend(is_causal=False))
    x = torch.randn(2, 4, 3, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(attend(query=x[:, :, 2:]), attend()[:, 2:], rtol=1e-5, atol=1e-6)


def test_masks_of_the_caller() -> None:
    """Boolean, additive, and longer than the keys, as for a static cache."""
    mask = torch.tensor([[1, 0, 0, 1], [1, 1, 0, 1], [1, 1, 1, 1]], dtype=torch.bool)[None, None]
    added = torch.where(mask, 0.0, -torch.inf)
    for given in (mask, added, mask[..., :3]):
        expected = attend(attention_mask=mask[..., :3])
        torch.testing.assert_close(attend(attention_mask=given), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(attend(attention_mask=added), attend(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"output_attentions": True}, "attention weights"),
        ({"cache": object()}, "paged caches"),
        ({"block_indices": object()}, "block_indices"),
    ],
)
def test_what_is_refused(option: dict[str, Any], text: str) -> None:
    """In one line."""
    with pytest.raises(NotImplementedError, match=text):
        attend(**option)


def test_missing_package_is_said() -> None:
    """With the command that installs it."""
    with (
        mock.patch.dict("sys.modules", {"transformers": None}),
        pytest.raises(ImportError, match=r"pip install 'transformers>=4.56,<6' 'torch>="),
    ):
        fa4.transformers.register()


@pytest.mark.parametrize("fault", ["window", "softcap", "sink", "mask"])
def test_the_comparison_sees_what_is_left_out(fault: str) -> None:
    """A model whose window, softcap, sinks or padding the attention function forgets."""
    name = {"window": "Mistral", "softcap": "Gemma2", "sink": "GPT-OSS", "mask": "Llama"}[fault]
    model = build(name)
    real = fa4.transformers.attend

    def forgetful(tensors: Any, options: Any, modification: Any, **named: Any) -> Any:
        if fault in ("window", "mask"):
            modification, options = None, options | {"causal": True}
        options |= {"softcap": {"softcap": 0.0}, "sink": {"learnable_sink": None}}.get(fault, {})
        return real(tensors, options, modification, **named)

    with mock.patch("fa4.transformers.attend", forgetful):
        ours = step(model, "fa4", torch.float32, fault == "mask")
    plain = step(model, "eager", torch.float32, fault == "mask")
    exact = step(model, "fa4_oracle", torch.float64, fault == "mask")
    with pytest.raises(AssertionError):
        assert_within(ours[0], plain[0], exact[0], size=exact[0].abs().max().item())


@pytest.mark.parametrize("trained", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", ["Llama", "BERT"])
def test_compiled_as_one_graph(name: str, trained: bool) -> None:
    """With padding, whose values nobody may read under a trace; and its gradient."""
    model = build(name)
    model.set_attn_implementation("fa4")
    plain = model(input_ids=TOKENS, attention_mask=PADDING).logits[PADDING.bool()]
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.set_grad_enabled(trained):
        logits = compiled(input_ids=TOKENS, attention_mask=PADDING).logits[PADDING.bool()]
    torch.testing.assert_close(logits, plain, rtol=1e-5, atol=1e-5)
    if trained:
        weights = [p for p in model.parameters() if p.requires_grad]
        grads = (
            torch.autograd.grad(x.tanh().square().mean(), weights, allow_unused=True)
            for x in (logits, plain)
        )
        for ours, theirs in zip(*grads, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def naive(x: Any, shown: Any, bias: Any = 0.0, sinks: Any = None) -> Any:
    """Attention of x to itself under a mask (..., Sq, Sk), in float64; (B, Sq, H, d)."""
    x = x.double()
    scores = x @ x.transpose(-1, -2) / x.shape[-1] ** 0.5 + bias
    scores = scores.masked_fill(~shown, float("-inf"))
    extra = torch.full_like(scores[..., :1], float("-inf")) if sinks is None else sinks.double()
    return (torch.cat([scores, extra], -1).softmax(-1)[..., :-1] @ x).transpose(1, 2)


def test_chosen_keys_and_sinks_of_every_query() -> None:
    """`indices`, with -1 for none, under every kind of mask; `sinks` beside a bias."""
    x = torch.randn(2, 4, 3, 8, generator=torch.Generator().manual_seed(0))
    causal = torch.ones(3, 3, dtype=torch.bool).tril()
    chosen = torch.tensor([[0, -1], [0, 1], [2, 0]], dtype=torch.int32).expand(2, 3, 2)
    keys = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    added = torch.zeros(2, 1, 3, 3).masked_fill(~causal, torch.finfo(torch.float32).min)
    for mask in (None, causal.expand(2, 1, 3, 3), added):
        out = attend(query=x, attention_mask=mask, indices=chosen)
        torch.testing.assert_close(out.double(), naive(x, keys & causal), rtol=1e-5, atol=1e-5)
    sinks, bias = torch.randn(2, 4, 3, 1), 30 * torch.randn(1, 4, 3, 3)
    for mask in (causal.expand(2, 1, 3, 3), added):
        out = attend(query=x, attention_mask=mask, position_bias=bias, sinks=sinks)
        exact = naive(x, causal, bias.double(), sinks)
        torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-5)
    out = attend(query=x, attention_mask=causal.expand(2, 1, 3, 3), sinks=sinks)
    torch.testing.assert_close(out.double(), naive(x, causal, 0.0, sinks), rtol=1e-5, atol=1e-5)
