"""A strict reader of Chrome traces in JSON, into tables that one can ask by SQL.

Perfetto's trace processor, a program that its Python package downloads, would load them too. This
reader refuses what viewers show wrongly or drop without a word: slices of a lane that overlap
without nesting, lanes without a name, times that are no whole nanoseconds, arrows with one end.
"""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from typing import Any

TABLES = """
CREATE TABLE process (pid INTEGER PRIMARY KEY, name TEXT NOT NULL);
CREATE TABLE thread (pid INTEGER, tid INTEGER, name TEXT NOT NULL, sort_index INTEGER NOT NULL,
                     PRIMARY KEY (pid, tid));
CREATE TABLE slice (pid INTEGER, tid INTEGER, name TEXT, cat TEXT, ts INTEGER, dur INTEGER,
                    depth INTEGER);
CREATE TABLE instant (pid INTEGER, tid INTEGER, name TEXT, ts INTEGER);
CREATE TABLE counter (pid INTEGER, name TEXT, ts INTEGER, value REAL);
CREATE TABLE flow (id INTEGER PRIMARY KEY, name TEXT, from_ts INTEGER, to_ts INTEGER);
"""  # times in nanoseconds
Event = dict[str, Any]


def load(text: str) -> sqlite3.Connection:
    """The tables of a trace. Raises ValueError for what a viewer would not show as it is meant."""
    document = json.loads(text, parse_constant=_refuse, object_pairs_hook=_once)
    events: list[Event] = document["traceEvents"]
    by_phase: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_phase[event["ph"]].append(event)
    if not by_phase.keys() <= set("MXiCsf"):
        raise ValueError(f"unknown phases in {sorted(by_phase)}")
    tables = sqlite3.connect(":memory:")
    tables.executescript(TABLES)
    _add_names(tables, by_phase["M"])
    _add_slices(tables, by_phase["X"])
    for event in by_phase["i"]:
        row = (event["pid"], event["tid"], event["name"], _ns(event, "ts"))
        tables.execute("INSERT INTO instant VALUES (?, ?, ?, ?)", row)
    _add_counters(tables, by_phase["C"])
    _add_flows(tables, by_phase["s"], by_phase["f"])
    nameless = tables.execute(
        "SELECT DISTINCT s.pid, s.tid FROM (SELECT pid, tid FROM slice UNION SELECT pid, tid FROM "
        "instant) s LEFT JOIN thread t ON s.pid = t.pid AND s.tid = t.tid WHERE t.name IS NULL"
    ).fetchall()
    if nameless:
        raise ValueError(f"lanes without a name: {nameless}")
    return tables


def _refuse(constant: str) -> None:
    raise ValueError(f"JSON has no {constant}")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError(f"a key is there twice in {pairs}")
    return dict(pairs)


def _ns(event: Event, key: str) -> int:
    value = event[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise ValueError(f"{key} must be a number, at least 0: {event}")
    ns = round(1000 * value)
    if abs(1000 * value - ns) > 1e-3:
        raise ValueError(f"{key} must be whole nanoseconds: {event}")
    return ns


def _add_names(tables: sqlite3.Connection, events: list[Event]) -> None:
    lanes: dict[tuple[int, int], dict[str, Any]] = defaultdict(dict)
    for event in events:
        if event["name"] == "process_name":
            row = (event["pid"], event["args"]["name"])
            tables.execute("INSERT INTO process VALUES (?, ?)", row)
        else:
            lanes[event["pid"], event["tid"]].update(event["args"])
    for (pid, tid), about in lanes.items():
        row = (pid, tid, about["name"], about["sort_index"])
        tables.execute("INSERT INTO thread VALUES (?, ?, ?, ?)", row)


def _add_slices(tables: sqlite3.Connection, events: list[Event]) -> None:
    lanes: dict[tuple[int, int], list[tuple[int, int, Event]]] = defaultdict(list)
    for event in events:
        start, length = _ns(event, "ts"), _ns(event, "dur")
        lanes[event["pid"], event["tid"]].append((start, -length, event))
    for (pid, tid), items in lanes.items():
        still: list[int] = []  # ends of the slices around
        for start, negative, event in sorted(items, key=lambda item: item[:2]):
            while still and still[-1] <= start:
                still.pop()
            if still and start - negative > still[-1]:
                raise ValueError(f"overlaps the slice before it without lying in it: {event}")
            row = (pid, tid, event["name"], event["cat"], start, -negative, len(still))
            tables.execute("INSERT INTO slice VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            still.append(start - negative)


def _add_counters(tables: sqlite3.Connection, events: list[Event]) -> None:
    seen: set[tuple[int, str, int]] = set()
    for event in events:
        for unit, value in event["args"].items():
            key = (event["pid"], f"{event['name']} {unit}", _ns(event, "ts"))
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"a counter's value must be a number: {event}")
            if key in seen:
                raise ValueError(f"two values of a counter at one time: {event}")
            seen.add(key)
            tables.execute("INSERT INTO counter VALUES (?, ?, ?, ?)", (*key, value))


def _add_flows(tables: sqlite3.Connection, starts: list[Event], ends: list[Event]) -> None:
    begun = {event["id"]: event for event in starts}
    if len(begun) < len(starts) or begun.keys() != {event["id"] for event in ends}:
        raise ValueError("an arrow has one end, or two beginnings")
    for end in ends:
        start = begun[end["id"]]
        for event in (start, end):
            inside = tables.execute(
                "SELECT COUNT(*) FROM slice WHERE pid = ? AND tid = ? AND ? BETWEEN ts AND ts+dur",
                (event["pid"], event["tid"], _ns(event, "ts")),
            ).fetchone()
            if not inside[0]:
                raise ValueError(f"an arrow ends in no slice: {event}")
        row = (end["id"], end["name"], _ns(start, "ts"), _ns(end, "ts"))
        tables.execute("INSERT INTO flow VALUES (?, ?, ?, ?)", row)
