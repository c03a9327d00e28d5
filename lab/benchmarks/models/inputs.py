"""Inputs that a model's forward asks for, by the names of its parameters."""

from __future__ import annotations

import inspect
from typing import Any

import torch

ROWS, TOKENS, TARGETS = 3, 11, 7
LEAST, MOST = 2, 49  # token ids: below is padding and the like, above where `shrink` puts others
PADDED = {"left": (0, 3, 7), "right": (0, 7, 3)}  # tokens of each row that are padding
GRIDS = ((1, 4, 4), (1, 4, 8))  # patches of images in a row: frames, height and width
# Nothing is padding; a row has padding on that side; nothing is, and the last token is another.
CASES = ("whole", "left", "right", "changed")


class NotBuildableError(Exception):
    """This walk knows no inputs for the class; the text says what is missing."""


def make_inputs(model: Any, case: str = "whole", filler: int = 1) -> dict[str, Any]:
    """Keywords for model.forward. filler: the token id of padding. Raises NotBuildableError."""
    draw = torch.Generator().manual_seed(0)
    asked = inspect.signature(model.forward).parameters
    needed = {
        name for name, p in asked.items()
        if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    }  # fmt: skip
    main = model.main_input_name
    given: dict[str, Any] = {}
    if takes_text(model):
        given |= _tokens(case, filler, draw)
    if "decoder_input_ids" in asked:
        given["decoder_input_ids"] = torch.randint(LEAST, MOST, (ROWS, TARGETS), generator=draw)
    two_towers = hasattr(model, "logit_scale")
    for name in asked:
        wanted = name in needed or name in (main, "bbox") or (name == "pixel_values" and two_towers)
        wanted |= name in ("pixel_values", "input_values", "input_features") and not given
        if name in MAKERS and wanted and name not in given:
            packed = name in ("hidden_states", "pixel_values") and "grid_thw" in needed
            given[name] = (_patches if packed else MAKERS[name])(model, draw)
    missing = needed - given.keys()
    if missing or not given:
        raise NotBuildableError(f"forward needs {', '.join(sorted(missing)) or 'other inputs'}")
    return given


def takes_text(model: Any) -> bool:
    """Is what it reads a row of tokens?"""
    asked = inspect.signature(model.forward).parameters
    main = model.main_input_name
    return (main == "input_ids" and ("input_ids" in asked or "attention_mask" in asked)) or (
        "input_ids" in asked and main not in ("input_features", "input_values")
    )


def mask_of(case: str) -> torch.Tensor:
    """(ROWS, TOKENS) bool: what is no padding."""
    counts = torch.tensor(PADDED.get(case, (0, 0, 0)))[:, None]
    places = torch.arange(TOKENS)
    return places >= counts if case == "left" else places < TOKENS - counts


def _tokens(case: str, filler: int, draw: torch.Generator) -> dict[str, Any]:
    tokens = torch.randint(LEAST, MOST, (ROWS, TOKENS), generator=draw)
    if case == "changed":
        tokens[:, -1] = (tokens[:, -1] - LEAST + 5) % (MOST - LEAST) + LEAST
    if case not in PADDED:
        return {"input_ids": tokens}
    mask = mask_of(case)
    return {"input_ids": tokens.masked_fill(~mask, filler), "attention_mask": mask.long()}


def _field(model: Any, *names: str, default: Any = None) -> Any:
    """The first of these fields in the configuration or in one of its parts."""
    parts = [getattr(model.config, name, None) for name in getattr(model.config, "sub_configs", {})]
    for part in (model.config, *parts):
        for name in names:
            if getattr(part, name, None) is not None:
                return getattr(part, name)
    return default


def _pixels(model: Any, draw: torch.Generator) -> torch.Tensor:
    size = _field(model, "image_size", "img_size", default=64)
    if isinstance(size, dict):
        size = (size["height"], size["width"])
    size = (size, size) if isinstance(size, int) else tuple(size)
    channels = _field(model, "num_channels", "in_channels", "in_chans", default=3)
    frames = _field(model, "num_frames")
    return torch.randn((ROWS, *([frames] if frames else []), channels, *size[-2:]), generator=draw)


def _patches(model: Any, draw: torch.Generator) -> torch.Tensor:
    """Of the images of GRIDS, one after the other."""
    size = _field(model, "patch_size")
    steps = _field(model, "temporal_patch_size", "patch_temporal", default=1)
    channels = _field(model, "num_channels", "in_channels", "in_chans", default=3)
    count = sum(t * h * w for t, h, w in GRIDS)
    return torch.randn(count, channels * steps * size * size, generator=draw)


def _past(model: Any, draw: torch.Generator) -> torch.Tensor:
    length, channels = _field(model, "context_length"), _field(model, "num_input_channels")
    return torch.randn((ROWS, length, *([channels] if channels else [])), generator=draw)


def _features(model: Any, draw: torch.Generator) -> torch.Tensor:
    bins = _field(model, "num_mel_bins", "feature_size", "input_feat_per_channel", "input_dim",
                  "n_mels", default=80)  # fmt: skip
    positions = _field(model, "max_source_positions", default=2000)
    if positions <= 1500:
        return torch.randn(ROWS, bins, 2 * positions, generator=draw)
    return torch.randn(ROWS, 40, bins, generator=draw)


def _embeddings(model: Any, draw: torch.Generator) -> torch.Tensor:
    width = _field(model, "hidden_size", "d_model", default=32)
    return torch.randn(ROWS, TOKENS, width, generator=draw)


MAKERS: dict[str, Any] = {
    "pixel_values": _pixels,
    "input_features": _features,
    "input_values": lambda model, draw: torch.randn(ROWS, 1600, generator=draw),
    "bbox": lambda model, draw: torch.zeros(ROWS, TOKENS, 4, dtype=torch.long),
    "inputs_embeds": _embeddings,
    "hidden_states": _embeddings,
    "grid_thw": lambda model, draw: torch.tensor(GRIDS),
    "merge_sizes": lambda model, draw: torch.full((len(GRIDS),), 2),
    "past_values": _past,
    "qformer_input_ids": lambda model, draw: torch.randint(
        LEAST, MOST, (ROWS, TOKENS), generator=draw
    ),
}
