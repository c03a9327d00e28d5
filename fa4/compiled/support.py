"""What the kernels refuse, by the tables of `fa4.compiled.features`, and these as plain data.

A call that a row refuses raises `NotSupported` before anything is compiled.
"""

from __future__ import annotations

from typing import Any

from fa4.compiled.calls import BackwardCall, ForwardCall
from fa4.compiled.features import TABLES

FAMILIES = {"sm_90a": "sm90", "sm_100a": "sm100", "sm_103a": "sm100"}  # of kernels, by arch


class NotSupported(NotImplementedError):
    """The kernel does not do what a call asks for; `feature` names the table's row."""

    def __init__(self, feature: str, message: str) -> None:
        super().__init__(message)
        self.feature = feature


def check(call: ForwardCall, family: str = "sm100") -> None:
    """Raises NotSupported, with the row's reason, if the kernels of a family do not do a call."""
    name = family + " backward" * isinstance(call, BackwardCall)
    for feature in TABLES[name]:
        value = feature.refused(call)
        if value is not None:
            title = f"{name.replace('sm', 'SM')} kernel"
            raise NotSupported(
                feature.name, f"{title}, {feature.name}: {feature.detail}; got {value}"
            )


# The columns of the matrix, by the names of the tables.
COLUMNS = {"forward": "sm100", "backward": "sm100 backward", "sm90": "sm90"}


def describe_support() -> list[dict[str, Any]]:
    """The tables as plain data, one row per feature; None where a kernel has no such row.

    detail: what is said of the first kernel that has the row, and where the others differ.
    """
    tables = {column: {row.name: row for row in TABLES[table]} for column, table in COLUMNS.items()}
    names = dict.fromkeys(name for rows in tables.values() for name in rows)
    return [
        {
            "feature": name,
            **{
                column: rows[name].supported if name in rows else None
                for column, rows in tables.items()
            },
            "detail": _details(
                {c: rows[name].detail for c, rows in tables.items() if name in rows}
            ),
        }
        for name in names
    ]


def _details(found: dict[str, str]) -> str:
    (_, first), *others = found.items()
    return "; ".join([first, *(f"{column}: {text}" for column, text in others if text != first)])
