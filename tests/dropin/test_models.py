"""Every class of the installed transformers that builds in small, by fa4 and by "eager"."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest

transformers = pytest.importorskip("transformers")

import fa4  # noqa: E402
from lab.benchmarks.models.walk import class_names, visit, walk  # noqa: E402
from lab.records import read_record  # noqa: E402

RECORD = read_record("models")
# Decoders with windows, softcaps, sinks, latent, sparse and hybrid attention; encoders; sequences
# to sequences; vision, speech and several of them; masks of "eager"; and what is refused.
SAMPLE = (
    "LlamaForCausalLM", "Gemma2ForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "GPT2LMHeadModel", "OPTForCausalLM",
    "AlbertModel", "ModernBertModel", "DistilBertModel", "T5Model", "M2M100Model",
    "PegasusXModel", "LongT5Model", "EncoderDecoderModel", "CLIPModel", "ViTModel",
    "Gemma3ForConditionalGeneration", "PaliGemmaModel", "Qwen2VLModel", "Speech2TextModel",
    "BloomForCausalLM", "MPNetModel", "LongformerModel", "FalconForCausalLM", "GPTJForCausalLM",
    "MptForCausalLM", "DebertaV2Model", "MambaForCausalLM",
)  # fmt: skip


@pytest.fixture(autouse=True)
def registered() -> Any:
    """The implementation "fa4"; transformers' log is not ours to test."""
    fa4.transformers.register()
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_class_is_right_or_refused(name: str) -> None:
    """Equal to "eager" with a call of fa4, or one line; as the record has it. Another version of
    transformers may route what was refused (5.24 routes GPT-J and CodeGen): then it is equal."""
    recorded = {x["name"]: x["status"] for x in RECORD["classes"]}
    found = visit(name)
    assert found.status in ("equal", recorded[name]) and found.status in ("equal", "refused"), found
    assert found.calls if found.status == "equal" else found.name[:4] in found.reason
    if found.status == "equal" and "right" in found.errors and name.endswith(("Model", "MaskedLM")):
        assert max(found.power.values()) > 1e-3  # padding and the future matter


def test_the_sample_is_drawn_from_all_kinds() -> None:
    """Thirty classes, all of those that are walked, of both answers."""
    recorded = {x["name"]: x for x in RECORD["classes"]}
    assert len(set(SAMPLE)) == 30 and set(SAMPLE) <= set(class_names())
    counts = Counter(recorded[name]["status"] for name in SAMPLE)
    assert counts["equal"] >= 20 and counts["refused"] >= 6
    assert any(recorded[name].get("masks") == "eager" for name in SAMPLE)


FAULTS = {
    "padding is dropped": ("BertModel", "fa4.transformers._combine", lambda *given: None),
    "causality is lost": (
        "LlamaForCausalLM",
        "fa4.transformers.attend",
        lambda tensors, options, *given, **named: REAL(
            tensors, options | {"causal": False}, *given, **named
        ),
    ),
    "a mask without the attention": (
        "BloomForCausalLM",
        "fa4.dropin.guard._require_service",
        lambda *given: None,
    ),
    "masks of sdpa for what knows none": (
        "PegasusXModel",
        "fa4.dropin.guard.adapt",
        lambda model, name: name,
    ),
    "keys that were not chosen": (
        "DeepseekV32ForCausalLM",
        "fa4.transformers._only",
        lambda indices, mask, tensors, causal: mask,
    ),
}
REAL = fa4.transformers.attend


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_sees_a_fault(fault: str) -> None:
    """What goes wrong in routing is another status than that of the record."""
    name, place, wrong = FAULTS[fault]
    bloom = name == "BloomForCausalLM"  # the masks of "eager" would keep it right
    kept = (
        mock.patch("fa4.dropin.guard.adapt", lambda model, name: name) if bloom else nullcontext()
    )
    with mock.patch(place, wrong), kept:
        assert visit(name).status in ("wrong", "raised")


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_class() -> None:
    """Nothing wrong, nothing that ends in another error; what is not buildable is not passed."""
    found = walk(class_names(), processes=2)
    counts = Counter(x.status for x in found)
    print(f"{len(found)} classes of transformers {transformers.__version__}: {dict(counts)}")
    for x in found:
        if x.status != "equal":
            print(f"{x.status}: {x.name}: {x.reason}")
    bad = [x for x in found if x.status in ("wrong", "raised", "equal without a call")]
    assert not bad, bad
    assert counts["equal"] >= 150
    assert all(x.reason for x in found if x.status in ("refused", "not buildable"))
    if transformers.__version__ == RECORD["versions"]["transformers"]:
        now = {x.name: x.status for x in found}
        assert [x for x in RECORD["classes"] if now[x["name"]] != x["status"]] == []
