"""Colours and letters of warp roles, the same in every timeline: explorer, pictures, pages.

Colours are those of Okabe and Ito, which people with any kind of colour blindness can tell apart;
letters say the same without colour. Warps that do the same kind of work have the same colour.
"""

from __future__ import annotations

from typing import NamedTuple


class RoleStyle(NamedTuple):
    """A letter or two, a colour for light and one for dark backgrounds, and what the warps do."""

    letter: str
    light: str
    dark: str
    about: str


ROLES = {
    "load": RoleStyle("L", "#56b4e9", "#56b4e9", "copies tiles of Q, K and V into shared memory"),
    "mma": RoleStyle("M", "#0072b2", "#3d9bd8", "issues the matrix products"),
    "softmax0": RoleStyle("S0", "#d55e00", "#ef7f2d", "softmax of query tile 0"),
    "softmax1": RoleStyle("S1", "#e69f00", "#f0b429", "softmax of query tile 1"),
    "correction": RoleStyle("C", "#cc79a7", "#d98fb8", "rescales O, and scales it at the end"),
    "epilogue": RoleStyle("E", "#009e73", "#1fb98e", "stores O"),
    "scheduler": RoleStyle("W", "#8c8c8c", "#a3a3a3", "asks the hardware for work tiles"),
    "compute": RoleStyle("S", "#d55e00", "#ef7f2d", "P from S, dS from dP"),
    "reduce": RoleStyle("R", "#cc79a7", "#d98fb8", "adds dQ into global memory"),
    "relay": RoleStyle("Y", "#009e73", "#1fb98e", "passes dS on within a CTA pair"),
    "consumer0": RoleStyle("C0", "#d55e00", "#ef7f2d", "products and softmax of 64 rows"),
    "consumer1": RoleStyle("C1", "#e69f00", "#f0b429", "products and softmax of 64 rows"),
    "consumer2": RoleStyle("C2", "#cc79a7", "#d98fb8", "products and softmax of 64 rows"),
}


def style_of(role: str) -> RoleStyle:
    """The style of a role; one that is not listed has a colour of its own and its first letter."""
    return ROLES.get(role, RoleStyle(role[:1].upper(), "#8c8c8c", "#a3a3a3", role))


# What each unit of an SM is called in them.
UNITS = {
    "tensor": "tensor core",
    "smem": "shared-memory port",
    "mufu": "exponentials (MUFU)",
    "fma": "FMA pipe",
    "alu": "ALU pipe",
    "issue": "instruction slots",
    "tmem_load": "TMEM loads",
    "tmem_store": "TMEM stores",
    "tma": "bulk copies (TMA)",
    "dsmem": "peer copies (DSMEM)",
    "reduce": "bulk reductions",
}
