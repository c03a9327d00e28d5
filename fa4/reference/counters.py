"""What an algorithm did: operation and traffic counts that every reference kernel returns."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Counters:
    """Work done by one call; counts add up over tiles, heads and sequences.

    exps: exponentials of score elements (emulated ones included). rescales_done/skipped: one per
    warp of 32 rows and KV tile after the first: was any of its O rows multiplied by alpha?
    matmul_flops: 2 per multiply-add in matrix products. other_flops: the rest of the float
    arithmetic on tiles. hbm_read_bytes/hbm_write_bytes: tile traffic to global memory, each tile
    charged whenever the algorithm loads or stores it.
    """

    exps: int = 0
    emulated_exps: int = 0
    rescales_done: int = 0
    rescales_skipped: int = 0
    matmul_flops: int = 0
    other_flops: int = 0
    hbm_read_bytes: int = 0
    hbm_write_bytes: int = 0

    def add(self, other: Counters) -> None:
        """Add the counts of `other` to these."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def rescale_rate(self) -> float:
        """Share of rescaling opportunities taken, 0.0 when there were none."""
        total = self.rescales_done + self.rescales_skipped
        return self.rescales_done / total if total else 0.0

    @property
    def emulated_share(self) -> float:
        """Share of exponentials computed by the polynomial, 0.0 when there were none."""
        return self.emulated_exps / self.exps if self.exps else 0.0

    @property
    def hbm_bytes(self) -> int:
        """Global memory traffic, read and written."""
        return self.hbm_read_bytes + self.hbm_write_bytes

    def as_dict(self) -> dict[str, int]:
        """The counts by name, for JSON."""
        return asdict(self)
