"""docs/drop-in.md: its tables of models are the result file's."""

from __future__ import annotations

from lab.pages.model_tables import MEANINGS, PAGE, TABLES, record


def test_tables_are_up_to_date() -> None:
    """If not: python -m lab.pages.model_tables."""
    assert list(TABLES.stale(PAGE.read_text(encoding="utf-8"))) == []


def test_a_changed_name_is_found() -> None:
    """In any of the tables."""
    document = PAGE.read_text(encoding="utf-8")
    assert list(TABLES.stale(document.replace("Longformer", "Longer"))) == ["refused"]


def test_the_record_is_whole_and_nothing_in_it_is_wrong() -> None:
    """At least 150 classes were compared; what was not, is not counted with them."""
    found = record()
    assert found["walked"] == len(found["classes"]) == sum(found["counts"].values())
    assert found["counts"].keys() <= MEANINGS.keys()
    assert found["counts"]["equal"] >= 150
    assert not found["counts"].keys() & {"wrong", "raised"}
    for row in found["classes"]:
        assert (row["status"] == "equal") == bool(row.get("calls") and row.get("errors"))
        assert row["status"] == "equal" or row.get("reason")
