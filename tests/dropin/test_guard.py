"""Models that nothing would be served of are refused, in one line, wherever they are asked for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fa4

transformers = pytest.importorskip("transformers")

from transformers import masking_utils, modeling_utils  # noqa: E402

from fa4.dropin.guard import adapt  # noqa: E402
from fa4.dropin.routing import is_routed, read_class, read_model  # noqa: E402

SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT = SIZES | {"intermediate_size": 48}
UNSERVED: dict[str, dict[str, Any]] = {
    "MPNet": BERT, "RemBert": BERT | {"input_embedding_size": 16, "output_embedding_size": 16},
    "RoFormer": BERT, "ConvBert": BERT | {"embedding_size": 32}, "IBert": BERT,
    "SqueezeBert": BERT | {"embedding_size": 32}, "Longformer": BERT | {"attention_window": 4},
    "Bloom": {"vocab_size": 97, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "GPTNeo": {"vocab_size": 97, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
               "attention_types": [[["global", "local"], 1]]},
    "Falcon": SIZES, "Mpt": {"vocab_size": 97, "d_model": 32, "n_layers": 2, "n_heads": 4},
    "Mamba": {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2},
}  # fmt: skip
LINE = r"cannot run with attn_implementation=\"fa4\": it .*; use eager"


@pytest.fixture(autouse=True)
def registered() -> Any:
    """The implementation "fa4"; transformers' log is not ours to test."""
    fa4.transformers.register()
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)


def parts(name: str) -> tuple[Any, Any]:
    """(class of the base model, a small configuration)."""
    config = getattr(transformers, f"{name}Config")(**UNSERVED[name])
    return getattr(transformers, f"{name}Model"), config


def assert_refused(call: Any, name: str) -> None:
    """In one line that names the model and what is allowed."""
    with pytest.raises(ValueError, match=LINE) as caught:
        call()
    assert str(caught.value).startswith(name) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", UNSERVED)
def test_refused_at_creation(name: str) -> None:
    """From a configuration, by the constructor, and by a class chosen for the configuration."""
    model, config = parts(name)
    assert_refused(lambda: model._from_config(config, attn_implementation="fa4"), name)
    _, config = parts(name)
    config._attn_implementation = "fa4"
    assert_refused(lambda: model(config), name)
    _, config = parts(name)
    auto = transformers.AutoModel
    assert_refused(lambda: auto.from_config(config, attn_implementation="fa4"), name)


@pytest.mark.parametrize("name", UNSERVED)
def test_refused_later_and_nothing_changes(name: str) -> None:
    """`set_attn_implementation`; the model goes on as it was."""
    model, config = parts(name)
    built = model._from_config(config, attn_implementation="eager").eval()
    tokens = torch.arange(3, 14)[None]
    before = built(tokens)[0]
    for asked in ("fa4", {"": "fa4"}):
        assert_refused(lambda asked=asked: built.set_attn_implementation(asked), name)
        assert built.config._attn_implementation == "eager"
    assert built(tokens)[0].equal(before)


def test_refused_for_a_checkpoint(tmp_path: Path) -> None:
    """`from_pretrained`, before weights are read."""
    model, config = parts("MPNet")
    model(config).save_pretrained(tmp_path)
    loaded = model.from_pretrained(tmp_path, attn_implementation="eager")
    assert loaded.config._attn_implementation == "eager"
    assert_refused(lambda: model.from_pretrained(tmp_path, attn_implementation="fa4"), "MPNet")
    auto = transformers.AutoModel
    assert_refused(lambda: auto.from_pretrained(tmp_path, attn_implementation="fa4"), "MPNet")


def pair(encoder: str, decoder: str) -> Any:
    """A configuration of an encoder and a decoder."""
    sizes = UNSERVED | {"Bert": BERT}
    made = [getattr(transformers, f"{x}Config")(**sizes[x]) for x in (encoder, decoder)]
    made[1].is_decoder = made[1].add_cross_attention = True
    return transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*made)


def test_parts_of_a_model() -> None:
    """A part that is not served is no reason to refuse, if another is; the result is right."""
    tokens, padding = torch.randint(3, 97, (2, 7)), torch.ones(2, 7, dtype=torch.long)
    padding[1, 5:] = 0
    given = {"input_ids": tokens, "attention_mask": padding, "decoder_input_ids": tokens[:, :4]}
    for encoder in ("Bert", "RoFormer", "MPNet"):
        torch.manual_seed(0)
        model = transformers.EncoderDecoderModel(pair(encoder, "Bert")).eval()
        model.set_attn_implementation("eager")
        plain = model(**given).logits
        for asked in ("fa4", {"encoder": "eager", "decoder": "fa4"}):
            model.set_attn_implementation("eager")
            model.set_attn_implementation(asked)
            torch.testing.assert_close(model(**given).logits, plain, rtol=1e-5, atol=1e-5)
        torch.manual_seed(0)
        made = transformers.EncoderDecoderModel._from_config(
            pair(encoder, "Bert"), attn_implementation="fa4"
        ).eval()
        torch.testing.assert_close(made(**given).logits, plain, rtol=1e-5, atol=1e-5)
    nothing = pair("MPNet", "RoFormer")
    assert_refused(
        lambda: transformers.EncoderDecoderModel._from_config(nothing, attn_implementation="fa4"),
        "EncoderDecoder",
    )


def test_parts_given_as_a_dictionary() -> None:
    """A vision and language model, with a name for each part."""
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4}
    vision = {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 8}
    text = {"model_type": "llama", "vocab_size": 97}
    config = transformers.LlavaConfig(
        vision_config=vision | small | heads, text_config=text | small | heads
    )
    asked = {"": "eager", "vision_config": "eager", "text_config": "fa4"}
    model = transformers.LlavaForConditionalGeneration._from_config(
        config, attn_implementation=asked
    )
    assert model.config.text_config._attn_implementation == "fa4"
    assert model.config.vision_config._attn_implementation == "eager"
    model.set_attn_implementation("fa4")
    assert model.config.vision_config._attn_implementation == "fa4"


@pytest.mark.parametrize("name", ["", "sdpa", "my_flash", "eager", "a|b", "a/b"])
def test_names_that_mean_something_else(name: str) -> None:
    """transformers reads these out of a name."""
    with pytest.raises(ValueError, match=re.escape(f"got {name!r}")):
        fa4.transformers.register(name)


SOURCE = """
class Inner(nn.Module):
    def forward(self, x{mask}):
        {routed}
        {products}
        {softmax}

class Whole(PreTrainedModel):
    def __init__(self, config):
        self.inner = {way}

    def forward(self, x):
        {masks}
"""
WAYS = ("Inner(config)", "TABLE[config._attn_implementation](config)", "helper(config)")


@settings(max_examples=60)
@given(
    routed=st.booleans(),
    product=st.sampled_from(("", "matmul", "bmm", "einsum", "@")),
    softmax=st.sampled_from(("", "function", "method", "module")),
    masked=st.booleans(),
    masks=st.sampled_from(("", "function", "interface")),
    way=st.sampled_from(WAYS),
    supported=st.booleans(),
)
def test_what_is_read_off_code(
    routed: bool, product: str, softmax: str, masked: bool, masks: str, way: str, supported: bool
) -> None:
    """Whether a module attends by itself, by the interface, and whose masks it takes."""
    products = {"": "", "@": "x @ x"}.get(product, f"torch.{product}(x, x)")
    probabilities = {
        "": "",
        "function": "nn.functional.softmax(x, -1)",
        "method": "x.softmax(-1)",
        "module": "nn.Softmax(-1)(x)",
    }[softmax]
    asked = {
        "": "pass",
        "function": "create_causal_mask(x)",
        "interface": "MASKS['fa4'](x)",
    }[masks]
    use = "INTERFACE.get_interface('fa4', None)" if routed else "pass"
    scope: dict[str, Any] = {
        "__name__": "drawn",
        "nn": nn,
        "torch": torch,
        "PreTrainedModel": transformers.PreTrainedModel,
        "INTERFACE": modeling_utils.AttentionInterface(),
        "MASKS": masking_utils.AttentionMaskInterface(),
        "create_causal_mask": masking_utils.create_causal_mask,
    }
    source = SOURCE.format(
        mask=", attention_mask" if masked else "", routed=use, products=products or "pass",
        softmax=probabilities or "pass", masks=asked, way=way,
    )  # fmt: skip
    exec(source, scope)
    exec("TABLE = {'eager': Inner, 'sdpa': Inner}\ndef helper(config): return Inner(config)", scope)
    inner, whole = scope["Inner"], scope["Whole"]
    whole._supports_sdpa = supported
    assert is_routed(inner) == routed and not is_routed(whole)
    attends = masked and bool(product and softmax)
    assert read_class(inner).attends == attends
    found = read_model(whole)
    assert found.own == (("Inner",) if attends and not routed else ())
    assert found.masks == bool(masks)
    assert found.choices == ((("eager", "sdpa"),) if "TABLE" in way else ())
    if found.choices:
        with pytest.raises(ValueError, match=r"Whole cannot run .* use eager or sdpa"):
            adapt(whole, "fa4")
    else:
        additive = bool(found.own and masks) or not supported
        assert adapt(whole, "fa4") == ("fa4_additive" if additive else "fa4")
