"""Trips of roles that pass over tiles, as a warpgroup that sees no key of what others need.

Such a role has a column of its own for each trip, behind those of the CTA: how many tiles it passes
over, before all others, and how often it goes through each of its loops then. A role that begins
its next work tile ahead of this one's output is taken to need all tiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fa4.plan.schema import FOLLOWING, Loop, PipelinePlan, Program, Role

PASSED = "passed_tiles"


def passes(role: Role) -> bool:
    """Has it columns of its own?"""
    ahead = any(isinstance(step, Loop) and step.trip == FOLLOWING for step in role.program)
    return bool(role.passing) and not ahead


def passing_roles(plan: PipelinePlan) -> tuple[str, ...]:
    """Roles that have columns of their own."""
    return tuple(role.name for role in plan.roles if passes(role))


def full_program(role: Role) -> Program:
    """What a role does per work tile, the tiles that it passes over included."""
    return (Loop(PASSED, role.passing), *role.program) if passes(role) else role.program


def own_columns(plan: PipelinePlan, role: Role) -> dict[str, int]:
    """Trip -> column of this role."""
    count = len(plan.trips)
    if not passes(role):
        return {trip: column for column, trip in enumerate(plan.trips)}
    first = count * (1 + passing_roles(plan).index(role.name))
    return {trip: first + n for n, trip in enumerate((PASSED, *plan.trips[1:]))}


def own_trips(plan: PipelinePlan, role: Role, trips: Sequence[int]) -> Mapping[str, int]:
    """Trip -> count of this role, of one work tile's row."""
    return {trip: int(trips[column]) for trip, column in own_columns(plan, role).items()}


def column_names(plan: PipelinePlan) -> list[str]:
    """What each column counts."""
    names = list(plan.trips)
    for role in passing_roles(plan):
        names += [f"{trip} of {role}" for trip in (PASSED, *plan.trips[1:])]
    return names


def widened(trips: np.ndarray, columns: int) -> np.ndarray:
    """(T, columns) from rows with less: then those that might pass over tiles see all of them."""
    missing = columns - trips.shape[1]
    if missing <= 0:
        return trips
    own = trips.copy()
    own[:, 0] = 0
    return np.concatenate([trips, *[own] * (missing // trips.shape[1])], axis=1)
