"""MiniLM in NumPy against torch, against transformers where installed, and by what it must know."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fa4 import cli
from fa4.demo.inputs import DEFAULT_TEXT, read_text, text_source
from fa4.demo.minilm import MiniLM, find_model, gelu, normalize

SENTENCES = ("The cat sat on the mat.", "A kitten is resting on a rug.", "Taxes are due in April.")

# Of a hidden state of up to about 6; float32 sums of 1536 terms in another order, six times over.
CLOSE = 2e-5


@pytest.fixture(scope="module")
def model() -> MiniLM:
    """The encoder; skipped where the weights are not installed."""
    try:
        return MiniLM(find_model())
    except ImportError as error:
        pytest.skip(str(error))


def last_hidden(model: MiniLM, chunks: list[np.ndarray]) -> list[np.ndarray]:
    """The last hidden state of each chunk, all chunks read at once."""
    *_, (_, _, _, hidden) = model.read(chunks)
    return np.split(hidden, np.cumsum([len(chunk) for chunk in chunks])[:-1])


def embed(model: MiniLM, sentence: str) -> np.ndarray:
    """Mean-pooled and normalised, as the model was trained to be used."""
    (hidden,) = last_hidden(model, model.encode(sentence))
    mean = hidden.mean(axis=0)
    return mean / np.linalg.norm(mean)


def test_gelu_is_exact() -> None:
    """The float32 nearest to x (1 + erf(x / sqrt 2)) / 2, or its neighbour."""
    x = np.linspace(-12, 12, 4801, dtype=np.float32)
    exact = [float(a) * (1 + math.erf(float(a) / math.sqrt(2))) / 2 for a in x]
    np.testing.assert_array_max_ulp(gelu(x), np.array(exact, np.float32), maxulp=1)


def test_layer_norm() -> None:
    """Mean 0 and variance 1 before scale and shift, by hand."""
    x = np.array([[1, 3], [5, 5]], np.float32)
    scale, shift = np.array([2, 1], np.float32), np.array([0, 10], np.float32)
    np.testing.assert_allclose(normalize(x, scale, shift, 1e-12), [[-2, 11], [0, 10]], rtol=1e-6)


def test_chunks(model: MiniLM) -> None:
    """Every token once, in order, between [CLS] and [SEP]; at most 512 in a chunk."""
    text = read_text(None)
    chunks = model.encode(text)
    assert len(chunks) >= 3
    assert [len(chunk) for chunk in chunks[:-1]] == [512] * (len(chunks) - 1)
    assert all((chunk[0], chunk[-1]) == (101, 102) for chunk in chunks)
    words = np.concatenate([chunk[1:-1] for chunk in chunks])
    halves = text.partition("\n\n")
    again = [part for half in halves for chunk in model.encode(half) for part in chunk[1:-1]]
    assert words.tolist() == again
    assert model.encode(" \n") == []


def test_similar_sentences_are_close(model: MiniLM) -> None:
    """The purpose of the model: cats near kittens, both far from taxes."""
    cat, kitten, taxes = (embed(model, sentence) for sentence in SENTENCES)
    assert cat @ kitten > 0.5
    assert max(cat @ taxes, kitten @ taxes) < 0.2


def torch_layer(weights: dict[str, Any], prefix: str, x: Any) -> Any:
    """One BERT layer by torch.nn.functional; x (S, 384)."""
    import torch.nn.functional as F

    def linear(x: Any, name: str) -> Any:
        return F.linear(x, weights[f"{prefix}.{name}.weight"], weights[f"{prefix}.{name}.bias"])

    def norm(x: Any, name: str) -> Any:
        scale, shift = weights[f"{prefix}.{name}.weight"], weights[f"{prefix}.{name}.bias"]
        return F.layer_norm(x, (384,), scale, shift, 1e-12)

    q, k, v = (
        linear(x, f"attention.self.{part}").reshape(-1, 12, 32).transpose(0, 1)
        for part in ("query", "key", "value")
    )
    attended = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).reshape(-1, 384)
    x = norm(x + linear(attended, "attention.output.dense"), "attention.output.LayerNorm")
    wide = F.gelu(linear(x, "intermediate.dense"))
    return norm(x + linear(wide, "output.dense"), "output.LayerNorm")


def test_against_torch(model: MiniLM) -> None:
    """Six layers by torch.nn.functional, in float64, on a whole chunk and on a short one."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    stored = load_file(find_model() / "model.safetensors")
    weights = {name: x.double() for name, x in stored.items() if x.is_floating_point()}
    chunks = model.encode(read_text(None))[-2:]
    for ids, ours in zip(chunks, last_hidden(model, chunks), strict=True):
        parts = ("word_embeddings", "position_embeddings", "token_type_embeddings")
        words, places, kinds = (weights[f"embeddings.{part}.weight"] for part in parts)
        x = words[torch.from_numpy(ids)] + places[: len(ids)] + kinds[0]
        scale, shift = (weights[f"embeddings.LayerNorm.{part}"] for part in ("weight", "bias"))
        x = torch.nn.functional.layer_norm(x, (384,), scale, shift, 1e-12)
        for layer in range(6):
            x = torch_layer(weights, f"encoder.layer.{layer}", x)
        assert np.abs(x.numpy() - ours).max() < CLOSE


def test_against_transformers(model: MiniLM) -> None:
    """The library the weights were made for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own and its dependencies'
        transformers = pytest.importorskip("transformers")
        torch = pytest.importorskip("torch")
        theirs = transformers.AutoModel.from_pretrained(find_model()).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(find_model())
        for sentence in SENTENCES:
            (ids,) = model.encode(sentence)
            assert tokenizer(sentence)["input_ids"] == ids.tolist()
            with torch.no_grad():
                expected = theirs(input_ids=torch.from_numpy(ids)[None]).last_hidden_state[0]
            assert np.abs(expected.numpy() - last_hidden(model, [ids])[0]).max() < CLOSE


def test_layers_of_a_text(model: MiniLM, tmp_path: Path) -> None:
    """Six layers of packed q, k, v; a text without words is refused."""
    source = text_source(None, max_chunks=2)
    layers = list(source.layers)
    assert source.num_layers == len(layers) == 6
    assert source.about["tokens_used"] == 1024 < source.about["tokens_in_text"]
    assert source.about["path"].endswith(DEFAULT_TEXT)
    for layer in layers:
        assert layer.q.shape == layer.k.shape == layer.v.shape == (1024, 12, 32)
        assert layer.cu_seqlens is not None and layer.cu_seqlens.tolist() == [0, 512, 1024]
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    with pytest.raises(ValueError, match=r"empty.txt must hold at least one word"):
        text_source(empty, max_chunks=2)


def test_demo_on_the_essay(
    model: MiniLM,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The command as people run it, on one chunk: all layers within budget, tau 8 skips most."""
    monkeypatch.setattr(cli, "COMMANDS", tuple({*cli.COMMANDS, "demo"}))
    with pytest.raises(SystemExit) as stop:
        cli.main(["demo", "--chunks", "1", "--out", str(tmp_path / "out"), "--json"])
    captured = capsys.readouterr()
    assert stop.value.code == 0
    assert "tokens are left out" in captured.err
    written = json.loads(captured.out)
    assert written["input"]["chunk_lengths"] == [512]
    assert [layer["within_budget"] for layer in written["layers"]] == [True] * 6
    assert written["config"]["rescale_threshold_log2"] == 8.0
    assert len(written["rescale_rate"]["tile_visited"]) == 15
    rates = dict(
        zip(written["rescale_rate"]["taus"], written["rescale_rate"]["total_rate"], strict=True)
    )
    assert rates[8.0] < 0.3 * rates[0.0]
