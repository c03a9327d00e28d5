"""Where CTAs of a cluster are, and what an actor is called in a report, whose CTA may be gone."""

from __future__ import annotations

from fa4.emulator.machine.state import Grid, Position


def ctas_of(grid: Grid, index: int) -> list[tuple[int, Position]]:
    """The CTAs of a cluster by rank: index in the grid, and where they are."""
    position = grid.cluster_position(index)
    shape, whole = grid.launch.cluster, grid.launch.grid
    ctas: list[tuple[int, Position]] = []
    for rank in range(grid.cluster_size):
        inner = (rank % shape[0], rank // shape[0] % shape[1], rank // (shape[0] * shape[1]))
        x, y, z = (p * s + i for p, s, i in zip(position, shape, inner, strict=True))
        linear = x + whole[0] * (y + whole[1] * z)
        ctas.append((linear, ((x, y, z), inner)))
    return ctas


def name_access(grid: Grid, mine: int, identity: int, line: int, cluster_number: int) -> str:
    """As of `NameAccess`. grid, mine: of the accessing actor, and the number of its cluster.

    The other one may be of a launch that overlaps this one, with CTAs and lines of its own.
    """
    number = mine if cluster_number < 0 else cluster_number
    owner = _grid_of(grid, number)
    ctas = [index for index, _ in ctas_of(owner, number - owner.number)]
    name = owner.rows.name_of(identity, ctas)
    if owner is not grid:
        name += f" of launch {owner.index}"
    return f"{name} ({owner.program.describe_line(line)})" if line else name


def _grid_of(grid: Grid, number: int) -> Grid:
    """The grid of the cluster of a number: this one, or one that overlaps it."""
    while number < grid.number and grid.prior is not None:
        grid = grid.prior
    while number >= grid.number + grid.cluster_count and grid.follower is not None:
        grid = grid.follower
    return grid
