"""Random calls of the Hopper forward kernel on guarded memory: do they end, are they right?

    python3 -m hardware.guarded.random_calls OUT.json [--calls 3000] [--seed N]     # GPU

Every tensor of torch, outputs and workspaces included, begins or ends at unmapped memory
(`hardware.guarded.memory`). Each two choices of type, head dims, heads, mask, sink, softcap, layout
and strides occur together; sequences without queries or keys may stand anywhere. The seed is drawn
unless it is given, and printed. A call that breaks the context, or does not end in 40 s, is written
down, and another process goes on behind it; exit code 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fa4.compiled.support import ForwardCall
from hardware.guarded.memory import CudaDriver, GuardedMemory, install_in_torch
from hardware.warpgroup_forward.random_launches import (
    Drawn,
    compile_all,
    describe,
    describe_machine,
    watch,
)
from hardware.warpgroup_forward.random_launches import run as launch

LEVELS: dict[str, tuple[Any, ...]] = {
    "dims": ((64, 64), (128, 128), (96, 96), (80, 80), (192, 128), (256, 256), (72, 40), (64, 256)),
    "heads": ((4, 4), (8, 2), (6, 2), (5, 1), (7, 7)),
    "window": ((None, None), (None, 0), (40, 0), (100, 30), (None, 25), (0, 0)),
    "packed": (False, True),
    "used": (False, True),
    "sink": (False, True),
    "softcap": (0.0, 20.0),
    "dtype": ("bf16", "fp16"),
    "strides": ("contiguous", "wide rows", "fused", "expanded heads"),
}
CANDIDATES = 24
EMPTY_SHARE = 0.25  # of a packed call's sequences have no queries; as many have no keys


class GuardedCall(NamedTuple):
    """A call, and how its tensors lie in memory."""

    call: Drawn
    strides: str


def pairs_of(form: dict[str, Any]) -> set[tuple[Any, ...]]:
    """Each two choices of a form."""
    return set(combinations(sorted(form.items()), 2))


def all_pairs() -> set[tuple[Any, ...]]:
    """Each two choices that can be made."""
    return {
        ((a, x), (b, y))
        for a, b in combinations(sorted(LEVELS), 2)
        for x, y in product(LEVELS[a], LEVELS[b])
    }


def draw_forms(rng: np.random.Generator) -> list[dict[str, Any]]:
    """Forms in which each two choices meet: of some random ones, always the one with most new."""
    missing, forms = all_pairs(), []
    while missing:
        candidates = [_meet(rng, missing) for _ in range(CANDIDATES)]
        best = max(candidates, key=lambda form: len(pairs_of(form) & missing))
        missing -= pairs_of(best)
        forms.append(best)
    return forms


def _meet(rng: np.random.Generator, missing: set[tuple[Any, ...]]) -> dict[str, Any]:
    """A random form with one of the missing pairs."""
    form = {name: levels[rng.integers(len(levels))] for name, levels in LEVELS.items()}
    listed = sorted(missing, key=repr)
    return form | dict(listed[rng.integers(len(listed))])


def draw_calls(seed: int, count: int, longest: int) -> list[GuardedCall]:
    """Every form in turn, each time with other sequences."""
    rng = np.random.default_rng(seed)
    forms = draw_forms(rng)
    calls = []
    for number in range(count):
        form = dict(forms[number % len(forms)])
        strides = form.pop("strides")
        calls.append(GuardedCall(Drawn(lengths=_lengths(rng, form, longest), **form), strides))
    return calls


def _lengths(
    rng: np.random.Generator, form: dict[str, Any], longest: int
) -> tuple[tuple[int, int], ...]:
    most = int(rng.choice([4, 70, 300, 1100]))
    most, count = min(most, longest), int(rng.integers(1, 6))
    if not form["packed"]:
        return ((int(rng.integers(1, most)), int(rng.integers(1, most))),) * count
    sizes = rng.integers(1, most, (count, 2)) * (rng.random((count, 2)) >= EMPTY_SHARE)
    if not sizes[:, 0].any():
        sizes[int(rng.integers(count)), 0] = 1
    if not sizes[:, 1].any():
        sizes[int(rng.integers(count)), 1] = 1
    return tuple((int(rows), int(keys)) for rows, keys in sizes)


def make_tensors(strides: str, drawn: Drawn, call: ForwardCall, place: str) -> tuple[Any, Any, Any]:
    """Q, K and V as `strides` says; K first, so that it may begin a segment of an allocator.

    What lies beside views of wide rows is NaN.
    """
    import torch

    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[drawn.dtype]
    dim, dim_v = drawn.dims

    def tensor(rows: int, heads: int, dim: int) -> torch.Tensor:
        shape = (rows, heads, dim) if drawn.packed else (call.batch, rows, heads, dim)
        if strides != "wide rows":
            return torch.randn(shape, device=place).to(kind)
        wide = (*shape[:-2], heads + 1, dim + 8)
        values = torch.full(wide, torch.nan, device=place, dtype=kind)[..., :heads, :dim]
        return values.copy_(torch.randn(shape, device=place))

    if strides == "expanded heads":
        k, v = (
            tensor(call.rows_k, 1, width).expand(
                *(-1,) * (1 if drawn.packed else 2), call.heads_k, -1
            )
            for width in (dim, dim_v)
        )
    elif strides == "fused":
        k, v = tensor(call.rows_k, call.heads_k, dim + dim_v).split((dim, dim_v), -1)
    else:
        k, v = (tensor(call.rows_k, call.heads_k, width) for width in (dim, dim_v))
    return tensor(call.rows_q, call.heads_q, dim), k, v


def work(calls: list[GuardedCall], first: int, impl: str, log: Path) -> None:
    """The calls from `first` on, each a line of the log before and after."""
    state: dict[str, Any] = {"since": time.monotonic(), "doing": ""}
    threading.Thread(target=watch, args=(state,), daemon=True).start()
    if impl == "sm90":
        install_in_torch(GuardedMemory(CudaDriver(), at_end=bool(first % 2)))
    with log.open("a") as stream:

        def say(number: int, **found: Any) -> None:
            stream.write(json.dumps({"number": number, **found}) + "\n")
            stream.flush()

        for number in range(first, len(calls)):
            one = calls[number]
            state.update(since=time.monotonic(), doing=f"{number}: {one}")
            say(number, started=True)
            try:
                share = launch(one.call, number, impl, partial(make_tensors, one.strides))
                say(number, share=share)
            except AssertionError as error:
                say(number, error=str(error)[:300])
            except Exception as error:  # the context may be lost: another process goes on
                say(number, error=f"{type(error).__name__}: {error}"[:300])
                os._exit(4)
    os._exit(0)  # not the allocator's end, which comes after its driver's


def supervise(arguments: argparse.Namespace, log: Path) -> dict[int, dict[str, Any]]:
    """Processes until every call is done, or broke one: the last line of each call."""
    found: dict[int, dict[str, Any]] = {}
    first = 0
    while first < arguments.calls:
        command = [sys.executable, "-m", "hardware.guarded.random_calls", str(arguments.out)]
        for name in ("calls", "seed", "longest", "impl"):
            command += [f"--{name}", str(getattr(arguments, name))]
        done = subprocess.run([*command, "--first", str(first)], check=False)
        for line in log.read_text().splitlines() if log.exists() else []:
            entry = json.loads(line)
            found[entry["number"]] = entry
        if len(found) <= first:
            raise SystemExit(f"no call was begun: exit code {done.returncode}")
        first = max(found) + 1
    for entry in found.values():
        if "started" in entry:
            entry["error"] = "the process ended, or hung, in this call"
    return found


def main() -> int:
    """Compiles, calls, writes what was found; exit code 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--longest", type=int, default=1100, help="rows or keys of a sequence")
    parser.add_argument("--impl", default="sm90", choices=("sm90", "emulator_sm90", "reference"))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only-compile", action="store_true")
    parser.add_argument("--first", type=int, help="work on the calls from this one on")
    arguments = parser.parse_args()
    calls = draw_calls(arguments.seed, arguments.calls, arguments.longest)
    log = arguments.out.with_suffix(".log")
    if arguments.first is not None:
        work(calls, arguments.first, arguments.impl, log)
    log.unlink(missing_ok=True)
    print(f"seed {arguments.seed}", flush=True)
    kernels = 0
    if arguments.impl != "reference":
        kernels = compile_all([describe(one.call) for one in calls], arguments.processes)
        print(f"{kernels} kernels", flush=True)
    if arguments.only_compile:
        return 0
    began = time.perf_counter()
    found = supervise(arguments, log)
    wrong = [
        {"number": number, "call": str(calls[number]), "error": entry["error"]}
        for number, entry in sorted(found.items())
        if "error" in entry
    ]
    report = describe_machine() | {
        "seed": arguments.seed, "calls": len(calls), "impl": arguments.impl, "kernels": kernels,
        "seconds": time.perf_counter() - began, "wrong": wrong,
        "worst_share": max((x["share"] for x in found.values() if "share" in x), default=None),
        "with_empty_sequences": sum(
            any(0 in pair for pair in one.call.lengths) for one in calls
        ),
        "strides": {
            name: sum(one.strides == name for one in calls) for name in LEVELS["strides"]
        },
    }  # fmt: skip
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report)[:2000], flush=True)
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
