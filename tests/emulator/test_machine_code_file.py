"""Machine code that is kept for other processes: used where it fits, and never in the way."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fa4.emulator.translate import machine_code_file, native
from fa4.emulator.translate.native import SegmentText, compile_functions

TEXT = """define i32 @SEGMENT(ptr %places, ptr %registers, i32 %mask, ptr %parameters) {{
  %x = mul i32 %mask, {factor}
  ret i32 %x
}}
"""


class Process:
    """What a new process knows: nothing. `compiled`: functions that it compiled itself."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.compiled: list[str] = []
        compile_module = native._compile_module

        def counted(text: str, names: list[str]) -> None:
            self.compiled += names
            compile_module(text, names)

        patch.setattr(native, "_compiled", {})
        patch.setattr(native, "_compile_module", counted)

    def results(self, *factors: int) -> list[int]:
        """Of functions that multiply."""
        bodies = {str(x): SegmentText(TEXT.format(factor=x), frozenset(), ()) for x in factors}
        return [compile_functions(bodies)[str(x)](0, 3, 0) for x in factors]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where code is kept."""
    monkeypatch.setenv(machine_code_file.VARIABLE, str(tmp_path / "a" / "b"))
    return tmp_path / "a" / "b" / machine_code_file.FILE


def run(*factors: int) -> int:
    """How many functions a new process compiles; what they return is right."""
    with pytest.MonkeyPatch.context() as patch:
        process = Process(patch)
        assert process.results(*factors) == [3 * x for x in factors]
    return len(process.compiled)


def test_another_process_compiles_nothing(file: Path) -> None:
    """But what is new, of which equal texts are one."""
    assert [run(5, 6, 7), run(6, 7), run(7, 8), run(8, 5)] == [3, 0, 1, 0]


def test_more_functions_than_sqlite_takes_at_once(file: Path) -> None:
    """A kernel has hundreds."""
    many = range(1, 2 * machine_code_file.ASKED_AT_ONCE + 2)
    assert [run(*many), run(*many)] == [len(many), 0]


def test_nobody_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept, and nothing written."""
    monkeypatch.setenv(machine_code_file.VARIABLE, "")
    monkeypatch.chdir(tmp_path)
    assert [run(5), run(5)] == [1, 1] and not list(tmp_path.iterdir())


def test_other_machines_are_not_served(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor what another compiler made."""
    assert run(5) == 1
    mine = native._target()
    monkeypatch.setattr(native, "_target", lambda: f"not {mine}")
    assert [run(5), run(5)] == [1, 0]


@pytest.mark.parametrize("what", ("host_cpu_name", "host_cpu_features", "llvm", "CODE", "PASSES"))
def test_what_tells_machines_apart(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU, its features, the compiler's version and what it is asked for."""
    mine = native._target()
    if what.isupper():
        monkeypatch.setattr(native, f"{what}_LEVEL", 3)
    elif what == "llvm":
        monkeypatch.setattr(native.llvm, "llvm_version_info", (1, 2, 3))
    else:
        other = native.llvm.FeatureMap({"none": True}) if "features" in what else "another"
        monkeypatch.setattr(native.llvm, f"get_{what}", lambda: other)
    assert native._target.__wrapped__() != mine


@pytest.mark.parametrize("damage", ("file", "object", "no object", "folder", "full"))
def test_damage_costs_time_alone(file: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file or an object that is none, a folder that cannot be, a file that is too large."""
    assert run(5, 6) == 2
    if damage == "file":
        file.write_bytes(b"no database" * 99)
    elif damage == "folder":
        monkeypatch.setenv(machine_code_file.VARIABLE, str(file / "below a file"))
    elif damage == "full":
        monkeypatch.setattr(machine_code_file, "MOST_BYTES", 1)
    else:
        text = "DELETE FROM objects" if damage == "no object" else "UPDATE objects SET data = x'00'"
        with sqlite3.connect(file) as opened:
            opened.execute(text)
        opened.close()
    assert run(5, 6) == 2
    if damage in ("file", "object", "no object"):
        assert run(5, 6) == 0  # it was begun anew


def test_many_write_at_the_same_time(file: Path) -> None:
    """All is kept."""
    with ThreadPoolExecutor(4) as pool:
        list(
            pool.map(
                lambda x: machine_code_file.keep(bytes([x]) * 999, [f"s{x}"], "cpu"), range(20)
            )
        )
    found = machine_code_file.kept_objects([f"s{x}" for x in range(21)], "cpu")
    assert sorted(found) == [(bytes([x]) * 999, [f"s{x}"]) for x in range(20)]
