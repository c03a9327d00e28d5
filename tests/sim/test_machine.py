"""Machines from TOML files: what differs from a base, or every figure; errors name file and field.

Also the file that `fa4 machines --toml` prints.
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from fa4.commands.machines import write_toml
from fa4.hardware import B200, Gpu
from fa4.sim.machine import BLACKWELL_COSTS, find_machine, read_machine

FULL = "\n".join(
    f"{item.name} = {getattr(B200, item.name)!r}".replace("'", '"')
    for item in fields(Gpu)
    if item.name != "sources"
)


def read(folder: Path, text: str) -> object:
    """The machine of a file with this text."""
    path = folder / "mine.toml"
    path.write_text(text)
    return read_machine(path)


def test_base_with_changes(tmp_path: Path) -> None:
    """Only what differs is written; sources follow."""
    path = tmp_path / "mine.toml"
    path.write_text(
        'base = "b200"\n[gpu]\nexp_per_clk = 32\nsm_count = 140\n[costs]\nlaunch_ns = 1000.0\n'
        '[sources]\nsm_count = "our device query"\n'
    )
    machine = find_machine(str(path))
    assert machine.name == "B200 (mine)"
    assert (machine.gpu.exp_per_clk, machine.gpu.sm_count) == (32, 140)
    assert machine.gpu.clock_hz == B200.clock_hz
    assert machine.costs.launch_ns == 1000.0
    assert machine.costs.sync_cycles == BLACKWELL_COSTS.sync_cycles
    assert machine.gpu.sources["sm_count"].text == "our device query"
    assert "mine.toml" in machine.gpu.sources["exp_per_clk"].text


def test_every_figure(tmp_path: Path) -> None:
    """Without a base, [gpu] holds all of it."""
    path = tmp_path / "mine.toml"
    path.write_text(f"[gpu]\n{FULL}\n")
    assert read_machine(path).gpu == B200


@pytest.mark.parametrize("name", [f.name for f in fields(Gpu) if f.name != "sources"])
def test_missing_figure(name: str, tmp_path: Path) -> None:
    """A missing figure is named with its file."""
    text = "\n".join(line for line in FULL.splitlines() if not line.startswith(f"{name} "))
    with pytest.raises(ValueError, match=rf"mine\.toml: gpu\.{name} is missing"):
        read(tmp_path, f"[gpu]\n{text}\n")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ('base = "b200"\n[gpu]\nsm_count = -1\n', ValueError, "sm_count must be at least 1"),
        ('base = "b200"\n[gpu]\nclock_hz = -1.0\n', ValueError, "clock_hz must be positive"),
        ('base = "b200"\n[costs]\nlaunch_ns = -1\n', ValueError, "launch_ns must be at least 0"),
        ('base = "b200"\n[costs]\nhbm_efficiency = 0\n', ValueError, "must be positive; got 0"),
        ('base = "b200"\n[costs]\nlaunch_ns = inf\n', ValueError, "launch_ns must be finite"),
        ('base = "b200"\n[gpu]\nsm_count = "all"\n', TypeError, "must be an integer; got 'all'"),
        ('base = "b200"\n[gpu]\nsms = 1\n', ValueError, "unknown field gpu.sms; allowed: arch"),
        ('base = "b200"\n[costs]\nx = 1\n', ValueError, "unknown field costs.x"),
        ('base = "b200"\nsm_count = 1\n', ValueError, "unknown entry 'sm_count'"),
        ('base = "b200"\ny = 1\nx = 1\n', ValueError, "unknown entry 'x'; allowed: base, gpu"),
        ('base = "b200"\n[gpu]\ny = 1\nx = 1\n', ValueError, r"unknown field gpu\.y; allowed"),
        ('name = "x"\n[gpu]\nname = "x"\n', ValueError, "unknown entry 'name'"),
        ('[gpu]\nname = "x"\n', ValueError, r"gpu\.arch is missing \(or name a base\)"),
        ("gpu = 3\n", ValueError, r"\[gpu\] must be a table"),
        ("[gpu\n", ValueError, "not valid TOML"),
    ],
)
def test_bad_files(text: str, error: type, message: str, tmp_path: Path) -> None:
    """The file and the field are named."""
    with pytest.raises(error, match=message) as caught:
        read(tmp_path, text)
    assert "mine.toml" in str(caught.value)


def test_printed_file_is_its_base(tmp_path: Path) -> None:
    """As printed, nothing differs but the name; with every # of a figure removed, neither."""
    machine = find_machine("b200")
    text = "\n".join(write_toml(machine))
    path = tmp_path / "my.toml"
    path.write_text(text)
    assert read_machine(path).costs == machine.costs
    assert {f.name for f in fields(Gpu) if getattr(read_machine(path).gpu, f.name)
            != getattr(machine.gpu, f.name)} == {"name"}  # fmt: skip
    active = re.sub(r"(?m)^# (\w+ = )", r"\1", text)
    path.write_text(active)
    changed = read_machine(path)
    assert changed.costs == machine.costs
    assert changed.name == "my B200" and changed.gpu.sm_count == machine.gpu.sm_count
    assert changed.gpu.sources["clock_hz"].text == "measured with nvidia-smi under load"
