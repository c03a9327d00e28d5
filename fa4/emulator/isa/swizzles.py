"""Whether a matrix instruction describes its operands as the tensor copies have laid them out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fa4.emulator.checks.shadow import Shadow
from fa4.emulator.machine.state import Cta, Fragment
from fa4.emulator.machine.tensor import PAGE_BYTES, swizzle_of
from fa4.emulator.tcgen05.descriptors import Swizzle
from fa4.emulator.tcgen05.tmem import Indices


@dataclass(frozen=True, eq=False)
class Pages:
    """Pages of shared memory that an operand lies in, and the swizzle its descriptor says.

    probes: byte address of one unit of the operand in each page.
    """

    operand: str
    probes: tuple[int, ...]
    swizzle: tuple[int, int]


def pages_of(operand: str, units: Indices, swizzle: Swizzle) -> Pages:
    """Of an operand's units, which lie at these addresses."""
    addresses = units.ravel()
    _, first = np.unique(addresses // PAGE_BYTES, return_index=True)
    probes = tuple(int(address) for address in addresses[first])
    return Pages(operand, probes, swizzle_of(swizzle))


def check_swizzle(fragment: Fragment, ctas: Iterable[Cta], pages: Sequence[Pages]) -> None:
    """Compares the descriptors with the layouts in which tensor copies have written to CTAs."""
    for cta in ctas:
        shadow = cta.smem_shadow
        if not cta.swizzles or shadow is None:
            continue
        for operand in pages:
            for address in operand.probes:
                noted = cta.swizzles.at(address)
                if noted in (None, operand.swizzle) or _overwritten(shadow, address):
                    continue
                fragment.fault(
                    "descriptor",
                    f"matrix {operand.operand} is described with {_swizzle_text(operand.swizzle)}, "
                    f"but the tensor copy that wrote shared address {address:#x} of CTA "
                    f"{cta.index} had {_swizzle_text(noted)}",
                )
                break


def _overwritten(shadow: Shadow, address: int) -> bool:
    """Whether threads have written there since the copy, in whatever layout."""
    return not shadow.written_by_async_proxy(address // shadow.granule_bytes)


def _swizzle_text(swizzle: tuple[int, int] | None) -> str:
    span, atom = swizzle or (0, 16)
    return f"{span}-byte swizzling (atoms of {atom} bytes)" if span else "no swizzling"
