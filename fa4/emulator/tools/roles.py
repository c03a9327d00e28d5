"""Warp roles of a warp-specialised kernel, found from what the warps executed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

# What a role is called: the first of these that its warps execute.
_SIGNS = (
    ("tcgen05.mma", "tensor issue"),
    ("wgmma", "tensor issue"),
    ("cp.reduce.async.bulk", "bulk reduction"),
    ("cp.async.bulk.tensor", "TMA"),
    ("cp.async.bulk", "bulk copy"),
)


@dataclass(frozen=True)
class WarpRole:
    """Warps that executed the same instructions. counts: warp instructions by opcode, summed."""

    name: str
    warps: tuple[int, ...]
    counts: Counter[str]


def find_roles(by_warp: dict[int, Counter[str]]) -> list[WarpRole]:
    """Groups warps that executed the same opcodes. Empty warps form the role "idle"."""
    groups: dict[frozenset[str], list[int]] = {}
    for warp in sorted(by_warp):
        groups.setdefault(frozenset(by_warp[warp]), []).append(warp)
    roles = []
    for opcodes, warps in groups.items():
        counts: Counter[str] = Counter()
        for warp in warps:
            counts.update(by_warp[warp])
        roles.append(WarpRole(_name(opcodes), tuple(warps), counts))
    return roles


def _name(opcodes: frozenset[str]) -> str:
    for sign, name in _SIGNS:
        if any(opcode.startswith(sign) for opcode in opcodes):
            if name == "TMA" and all(
                ".global.shared" in o for o in opcodes if o.startswith("cp.async.bulk.tensor")
            ):
                return "TMA store"
            return name
    return "compute" if opcodes else "idle"
