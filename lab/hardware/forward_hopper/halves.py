"""The kernel with two softmax warpgroups for each Q tile on a Hopper GPU, as `skeleton`.

python -m lab.hardware.forward_hopper.halves make FOLDER --ptxas PTXAS
python3 -m lab.hardware.suite FOLDER RESULTS.npz                                  # GPU
python -m lab.hardware.forward_hopper.halves compare FOLDER RESULTS.npz
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lab.hardware.forward_hopper.skeleton import SUITE as FORWARD
from lab.hardware.forward_hopper.skeleton import make_all
from lab.hardware.forward_hopper.skeleton_cases import cases_of_halves
from lab.hardware.launches import Made


def make(ptxas: str) -> Iterator[Made]:
    """Every case."""
    yield from make_all(cases_of_halves(), ptxas)


SUITE = replace(FORWARD, record="halves_skeleton_hopper", make=make)

if __name__ == "__main__":
    raise SystemExit(SUITE.main(__doc__))
