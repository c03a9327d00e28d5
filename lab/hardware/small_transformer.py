"""A small transformer trained through fa4 and through torch's back ends: are the losses alike?

    python3 -m lab.hardware.small_transformer OUT.json [--steps 200] [--seeds 3]     # GPU

The same parameters and the same data each time; only the attention differs. Two back ends of torch
round differently, and training carries that on: fa4's losses must be no further from the nearest
of torch's than torch's furthest two are from one another (root mean square over the steps of
several trainings: in one it is chance that decides). Exit code 1 if they are, or if the model has
not learnt.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from itertools import combinations
from math import log
from pathlib import Path
from statistics import fmean
from typing import Any

from lab.hardware.there import describe_machine

LAYERS, HEADS, KV_HEADS = 4, 8, 2
WORDS, OWN_WORDS, LENGTH, BATCH = 96, 6, 512, 8
SHAPES = {"d64": 64, "d128": 128, "d192": 192}
TORCH = ("math", "flash", "cudnn")
RATE, WARM_STEPS, SEED = 3e-4, 20, 7
LEARNT = 0.85  # of the least loss without attention, at most
Attend = Callable[..., Any]


def find_attention(name: str) -> Attend:
    """Causal attention of (batch, rows, heads, d), grouped heads: torch's back end, or fa4's."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if name.startswith("fa4"):
        import fa4

        fixed = "order" in name
        return lambda q, k, v: fa4.flash_attn_func(
            q, k, v, causal=True, deterministic=fixed, impl="auto"
        )
    backend = {
        "math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
    }[name]  # fmt: skip

    def attend(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        with sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2)

    return attend


def make_model(head_dim: int, device: str, seed: int = SEED) -> dict[str, Any]:
    """Parameters in float32: embeddings, and of each layer its products; the same for a seed."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    width = HEADS * head_dim

    def drawn(*shape: int) -> Any:
        values = torch.randn(shape, device=device, generator=generator) * shape[-1] ** -0.5
        return values.requires_grad_()

    found = {"words": drawn(WORDS, width), "places": drawn(LENGTH, width)}
    for layer in range(LAYERS):
        found[f"{layer} qkv"] = drawn((HEADS + 2 * KV_HEADS) * head_dim, width)
        found[f"{layer} out"] = drawn(width, HEADS * head_dim)
        found[f"{layer} up"] = drawn(2 * width, width)
        found[f"{layer} down"] = drawn(width, 2 * width)
    return found


def logits_of(model: dict[str, Any], tokens: Any, head_dim: int, attend: Attend) -> Any:
    """(batch, rows, words); products and attention in bf16."""
    import torch
    from torch.nn.functional import gelu, linear

    x = (model["words"][tokens] + model["places"][: tokens.shape[1]]) * head_dim**0.5

    def norm(x: Any) -> Any:
        return torch.nn.functional.layer_norm(x.float(), x.shape[-1:]).bfloat16()

    for layer in range(LAYERS):
        weights = {n: model[f"{layer} {n}"].bfloat16() for n in ("qkv", "out", "up", "down")}
        heads = linear(norm(x), weights["qkv"]).unflatten(-1, (-1, head_dim))
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), 2)
        x = x + linear(attend(q, k, v).flatten(2), weights["out"])
        x = x + linear(gelu(linear(norm(x), weights["up"])), weights["down"])
    return linear(norm(x), model["words"].bfloat16()).float()


def draw_tokens(steps: int, device: str, seed: int = SEED) -> Any:
    """(steps, batch, rows + 1): each sequence has few words, which only its rows before tell."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    own = torch.randint(WORDS, (steps, BATCH, OWN_WORDS), generator=generator)
    picks = torch.randint(OWN_WORDS, (steps, BATCH, LENGTH + 1), generator=generator)
    return own.gather(-1, picks).to(device)


def train(name: str, head_dim: int, steps: int, device: str, seed: int = SEED) -> list[float]:
    """The loss of every step."""
    import torch
    from torch.nn.functional import cross_entropy

    attend, model = find_attention(name), make_model(head_dim, device, seed)
    optimizer = torch.optim.AdamW(model.values(), lr=RATE, betas=(0.9, 0.95))
    losses = []
    for step, tokens in enumerate(draw_tokens(steps, device, seed)):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARM_STEPS)
        logits = logits_of(model, tokens[:, :-1], head_dim, attend)
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [float(x) for x in torch.stack(losses).cpu()]


def distance(a: list[float], b: list[float]) -> float:
    """Root mean square over the steps."""
    return float((sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / len(a)) ** 0.5)


def judge(trainings: list[dict[str, list[float]]]) -> dict[str, Any]:
    """How far apart torch's are, and fa4's from the nearest of them; is all well?

    Of each training the losses by back end; distances are root mean squares over the trainings.
    """
    apart = _together(
        max(distance(losses[a], losses[b]) for a, b in combinations(_theirs(losses), 2))
        for losses in trainings
    )
    ours = {
        name: _together(
            min(distance(losses[name], losses[other]) for other in _theirs(losses))
            for losses in trainings
        )
        for name in trainings[0]
        if name not in TORCH
    }
    learnt = all(
        found[-1] < LEARNT * log(WORDS) for losses in trainings for found in losses.values()
    )
    ok = learnt and bool(ours) and all(far <= apart for far in ours.values())
    return {"torch_apart": apart, "nearest": ours, "learnt": learnt, "ok": ok}


def _theirs(losses: dict[str, list[float]]) -> list[str]:
    return [name for name in losses if name in TORCH]


def _together(distances: Iterable[float]) -> float:
    return fmean(x * x for x in distances) ** 0.5


def train_all(head_dim: int, steps: int, seed: int) -> dict[str, list[float]]:
    """The losses of every back end that can."""
    losses: dict[str, list[float]] = {}
    for name in (*TORCH, "fa4", "fa4 in order"):
        begun = time.monotonic()
        try:
            found = losses[name] = train(name, head_dim, steps, "cuda", seed)
        except RuntimeError as error:  # a back end of torch that cannot
            if name not in TORCH:
                raise
            print(f"d{head_dim} {name}: {str(error)[:200]}", flush=True)
        else:
            print(f"d{head_dim} {name}: {found[0]:.4f} to {found[-1]:.4f} in "
                  f"{time.monotonic() - begun:.1f} s", flush=True)  # fmt: skip
    return losses


def main() -> int:
    """Trains; writes losses and distances."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each model")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    arguments = parser.parse_args()
    report: dict[str, Any] = describe_machine() | {"steps": arguments.steps, "models": {}}
    seeds = range(SEED, SEED + arguments.seeds)
    for shape in arguments.shapes.split(","):
        trainings = [train_all(SHAPES[shape], arguments.steps, seed) for seed in seeds]
        found = judge(trainings)
        report["models"][shape] = found | {"losses": trainings}
        print(shape, found, flush=True)
        arguments.out.write_text(json.dumps(report) + "\n")
    return int(not all(model["ok"] for model in report["models"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
