"""Plans by the name of their method, and which method takes what.

ring         K and V travel from rank to rank while they are used; merges
ulysses      all-to-all: rows for heads, one call, and back
ring+ulysses Ulysses of `degree` neighbours inside, a ring of the teams outside
all_gather   K and V of every rank to every rank, by groups of KV heads
halo         all_gather of what the rows see and no more: for windows
pass_q       queries travel, partial results come back
tree         queries on all ranks, partial results merged in pairs (decoding)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fa4.config import require, require_int
from fa4.distributed import gather, ring
from fa4.distributed.plan import CommunicationPlan, RankProgram, Spec

METHODS: dict[str, Callable[[Spec, int], RankProgram]] = {
    "ring": ring.make_program,
    "ulysses": ring.make_program,
    "ring+ulysses": ring.make_program,
    "all_gather": gather.make_program,
    "halo": gather.make_program,
    "pass_q": gather.make_passing,
    "tree": gather.make_tree,
}


def check_spec(spec: Spec) -> Spec:
    """The spec with the degree that its method means. ValueError: one line, what does not fit."""
    require(spec.method in METHODS, f"method must be one of {', '.join(METHODS)}", spec.method)
    require_int("degree", spec.degree, 1, spec.ranks)
    require_int("head_groups", spec.head_groups, 1, 2**20)
    require_int("tile", spec.tile, 0, 2**31)
    ranks = spec.keys.ranks
    require(spec.rows.ranks == ranks, f"rows must be laid out over {ranks} ranks", spec.rows.ranks)
    if spec.method != "ring+ulysses":
        spec = replace(spec, degree=spec.ranks if spec.method == "ulysses" else 1)
    if spec.tile:
        _check_tiles(spec)
    if METHODS[spec.method] is ring.make_program:
        ring.check_degree(spec)
    if spec.method == "tree":
        gather.check_tree(spec)
    return spec


def _check_tiles(spec: Spec) -> None:
    """Results that do not depend on the ranks need whole tiles on each, and rows that meet all
    their keys in one call.
    """
    if spec.method not in ("all_gather", "halo"):
        raise ValueError(f'order="exact" needs method all_gather or halo; got {spec.method}')
    for run in (run for runs in (*spec.rows.shards, *spec.keys.shards) for run in runs):
        for edge in (run.start, run.stop):
            first = max(x for x in spec.mask.documents if x <= edge)
            if run.step != 1 or ((edge - first) % spec.tile and edge not in spec.mask.documents):
                raise ValueError(
                    f'order="exact" needs runs cut at multiples of {spec.tile} rows of their '
                    f"document; got {run.start}:{run.stop}:{run.step}"
                )


def make_program(spec: Spec, rank: int) -> RankProgram:
    """One rank's program of a checked spec."""
    return METHODS[spec.method](spec, rank)


def make_plan(spec: Spec) -> CommunicationPlan:
    """The programs of all ranks. Raises ValueError for a spec that its method does not fit."""
    spec = check_spec(spec)
    return CommunicationPlan(spec, tuple(make_program(spec, rank) for rank in range(spec.ranks)))
