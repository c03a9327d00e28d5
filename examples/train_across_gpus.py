"""Train a small language model whose sequence is divided over ranks.

    torchrun --nproc_per_node 2 examples/train_across_gpus.py --steps 200

Each rank holds its rows of the sequence: of tokens, labels and rotary positions, all cut by one
layout. `fa4.distributed.attention` lets them see each other; everything else in the model works on
single rows. Labels are shifted before they are cut, the loss is a mean over the tokens of all
ranks, and gradients are summed over the group. One process alone computes the same:

    python examples/train_across_gpus.py --steps 200

On GPUs over NCCL in bf16, on CPUs over gloo in float64. Prints the loss of each tenth step; --out
writes all of them as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fa4 import distributed

WORDS, WIDTH, HEADS, ROWS = 32, 64, 4, 96


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of (B, rows, heads, dim) at positions of the whole sequence."""
    half = x.shape[-1] // 2
    angle = positions[:, None] / 100.0 ** (torch.arange(half, device=x.device) / half)
    sine, cosine = (f(angle)[None, :, None].to(x.dtype) for f in (torch.sin, torch.cos))
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cosine - b * sine, a * sine + b * cosine], dim=-1)


class Model(nn.Module):
    """One layer of attention and one of words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.mixer = nn.Linear(WIDTH, 3 * WIDTH)
        self.words = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor, layout: distributed.RowLayout, rank: int):
        """Logits of this rank's rows."""
        x = self.embedding(tokens)
        parts = self.mixer(x).view(*tokens.shape, 3, HEADS, WIDTH // HEADS).unbind(2)
        q, k, v = (part.contiguous() for part in parts)
        positions = distributed.positions(layout, rank, tokens.device)
        q, k = rotate(q, positions), rotate(k, positions)
        seen = distributed.attention(q, k, v, layout=layout, causal=True)
        return self.words(x + seen.flatten(2))


def train(steps: int) -> tuple[list[float], Model]:
    """The loss of each step, and the model; the same on every rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float64)
    torch.manual_seed(0)
    model = Model().to(device, dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    layout = distributed.make_layout("zigzag", ROWS, ranks)
    drawn = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        start = torch.randint(0, WORDS, (2, 1), generator=drawn)
        stride = torch.randint(1, 4, (2, 1), generator=drawn)
        whole = (start + stride * torch.arange(ROWS + 1)) % WORDS  # told by the words before
        tokens, labels = (
            layout.shard(x.contiguous(), rank).to(device) for x in (whole[:, :-1], whole[:, 1:])
        )
        logits = model(tokens, layout, rank).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
        loss = loss / whole[:, 1:].numel()
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach().clone()
        for x in (total, *(x.grad for x in model.parameters())):
            dist.all_reduce(x)
        optimizer.step()
        losses.append(float(total))
    return losses, model


def main() -> None:
    """As torchrun starts it, or alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, help="write losses and the sum of all weights")
    given = parser.parse_args()
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    losses, model = train(given.steps)
    if dist.get_rank() == 0:
        for step in range(0, given.steps, 10):
            print(f"step {step}: loss {losses[step]:.4f}")
        if given.out:
            weights = [float(x.detach().double().abs().sum()) for x in model.parameters()]
            given.out.write_text(json.dumps({"losses": losses, "weights": weights}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
