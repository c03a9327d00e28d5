"""What changes the scores of a thread's two keys, and how a gradient passes back through that.

The callables are those of `fa4.sm100.backward.mods`. A part of S^T is a run of its elements, in the
accumulator's order; its columns are queries.
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4.config import WARPGROUP_ROWS
from fa4.kit.units import WARPGROUP
from fa4.sm90.forward import fragment
from fa4.sm100.backward.mods import KeyMods, key_mods
from fa4.sm100.backward.tiles import KeyTile


class FragmentKeyMods(KeyMods):
    """The mods of one key, by instructions that Hopper has."""

    def tanh(self, raw: list[Float32]) -> list[Float32]:
        """tanh of scores as softcap scales them."""
        return fragment.tanh(raw, self.scale)

    def one_minus_squares(self, values: list[Float32], factors: list[Float32]) -> list[Float32]:
        """factor * (1 - x^2)."""
        return fragment.one_minus_squares(values, factors)


@dataclass(frozen=True)
class ScoreMods:
    """What a thread's scores are changed by: of its two keys, for the head at hand.

    first_column: the thread's.
    """

    keys: tuple
    first_column: Int32

    @property
    def spec(self) -> Any:
        """The kernel's."""
        return self.keys[0].spec

    def of_head(self, head: Int32) -> "ScoreMods":
        """The same for a query head."""
        return replace(self, keys=tuple(replace(key, head=head) for key in self.keys))

    def modified(self, raw: list[Float32], first_row: Int32, first: int = 0) -> list[Float32]:
        """Scores modified and masked by mask_mod; raw: the elements from `first` on."""
        if not (self.spec.modifies_scores or self.spec.mask_mod):
            return raw
        row = first_row + self.first_column
        return self._each(first, lambda key, some: key.modified(some, row), raw)

    def passed_back(
        self, gradients: list[Float32], raw: list[Float32], first_row: Int32, first: int
    ) -> list[Float32]:
        """Gradients of the modified scores as those of the scores times softmax_scale."""
        row = first_row + self.first_column
        return self._each(
            first, lambda key, grads, some: key.passed_back(grads, some, row), gradients, raw
        )

    def _each(self, first: int, change: Any, *lists: list[Float32]) -> list[Float32]:
        """Both keys' elements, changed."""
        columns = [fragment.column_of(first + i) for i in range(len(lists[0]))]
        found = []
        for number, key in enumerate(self.keys):
            mine = [fragment.of_row(values, number) for values in lists]
            found.append(change(replace(key, columns=fragment.of_row(columns, number)), *mine))
        return fragment.joined(*found)


def score_mods(
    spec: cutlass.Constexpr, scale: Float32 | None, aux: Any, tile: KeyTile, number: Int32
) -> ScoreMods:
    """The mods of a thread's keys; number: of its warpgroup."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    first_key = tile.first_key + number * WARPGROUP_ROWS + fragment.thread_row(thread)
    keys = []
    for step in (0, fragment.ROW_STEP):
        key = key_mods(spec, scale, aux, tile, first_key + step)
        keys.append(FragmentKeyMods(**{name: getattr(key, name) for name in vars(key)}))
    return ScoreMods(tuple(keys), 2 * (thread % fragment.QUAD))
