"""What two ranks of one GPU told each other by copy engines (`distributed.one_gpu` of lab)."""

from __future__ import annotations

from typing import Any

from lab.records import read_record

FOUND: dict[str, Any] = read_record("ranks_of_one_gpu")


def rows_with(key: str) -> list[dict[str, Any]]:
    return [row for row in FOUND["right"] if key in row]


def test_every_part_ended() -> None:
    """What was left out would stand there with its error."""
    assert FOUND["left_out"] == [] and FOUND["gpus"] == 2


def test_methods_are_right() -> None:
    """Within twice the error of one GPU, on which the record agrees with itself."""
    from lab.hardware.distributed.checks import METHODS

    rows = rows_with("method")
    assert {row["method"] for row in rows} == set(METHODS)
    assert all(row["right"] and row["error"] <= row["budget"] for row in rows)


def test_nothing_is_wrong_and_what_would_be_is_seen() -> None:
    """Of the record nothing; with one value changed exactly that row."""
    from lab.hardware.distributed.session import wrong_rows

    good = [*FOUND["right"], {"random_calls": 40, "wrong": [], "of_budget": 0.5}]
    assert wrong_rows({"right": good}) == []
    planted = {"right": False, "same_bits_as_one_gpu": False, "relative_rms": float("nan"),
               "of_budget": 1.01, "wrong": [[3, "ring"]]}  # fmt: skip
    for key, value in planted.items():
        at = next(n for n, row in enumerate(good) if key in row)
        rows = [row | {key: value} if n == at else row for n, row in enumerate(good)]
        assert wrong_rows({"right": rows}) == [rows[at]], key


def test_gradients_are_those_of_one_gpu() -> None:
    """bf16 gradients summed in another order: a relative error of one rounding, 2^-8."""
    rows = rows_with("gradient")
    assert [row["gradient"] for row in rows] == ["dq", "dk", "dv"]
    assert all(row["relative_rms"] < 2**-8 for row in rows)


def test_the_exact_order_gives_the_bits_of_one_gpu() -> None:
    rows = rows_with("order")
    assert len(rows) == 6 and all(row["same_bits_as_one_gpu"] for row in rows)
