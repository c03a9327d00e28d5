"""Result files and what is known of their making; `python -m lab.records` lists them.

`write_record` writes a file of `lab/table.py` and notes beside it, in lab/ledger.json, what it was
made from: the hash of its programs and files, commit, machine, versions, date, and the hash of the
file itself. It refuses a tree with uncommitted changes. What was made elsewhere, a GPU's record,
`python -m lab.records stamp NAME --commit COMMIT` notes, with the hash of that commit's programs.
"""

from __future__ import annotations

import argparse
import io
import json
import shlex
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lab import ROOT
from lab.machine import describe_machine, describe_run
from lab.sources import SourceTree, digest, hash_bytes
from lab.table import BY_NAME, RECORDS, Record

LEDGER = ROOT / "lab" / "ledger.json"
CURRENT, OLDER, UNKNOWN = "of this code", "older than the code", "its code is unknown"
EDITED = "not the file that was recorded"


@dataclass(frozen=True, kw_only=True)
class Making:
    """How a record came to be. None: nobody noted it.

    content, sources: hashes of the file and of its programs. files: path -> hash. commit:
    abbreviated, of a history that may have begun anew since. clean: were all changes committed?
    """

    content: str
    sources: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    commit: str | None = None
    clean: bool | None = None
    date: str | None = None
    machine: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.sources and (not self.commit or self.clean is False):
            raise ValueError(f"only a clean commit has known sources; got {self.commit!r}")


def find_record(name: str) -> Record:
    """The record of a name. Raises ValueError if there is none."""
    if name not in BY_NAME:
        raise ValueError(f"no record {name!r} in lab/table.py; there are {', '.join(BY_NAME)}")
    return BY_NAME[name]


def record_path(name: str) -> Path:
    """Where the result file of a record lies."""
    return ROOT / find_record(name).path


def read_record(name: str, folder: Path | None = None) -> Any:
    """What a result file holds; a copy of it in a folder, if one is given."""
    path = record_path(name)
    return json.loads((folder / path.name if folder else path).read_text("utf-8"))


def to_json(report: Any) -> str:
    """The text of a report."""
    return json.dumps(report, indent=2) + "\n"


def write_record(
    path: Path, report: Any, packages: tuple[str, ...] = (), *, machine: str | None = None,
    whole: bool = True, render: Callable[[Any], str] = to_json,
) -> None:  # fmt: skip
    """Write a report, whole or not at all; note its making if it is a record's file.

    packages: whose versions matter. machine: if not this one. whole: False where parts of the file
    are of an earlier run, so that no one tree made it. Raises ValueError, after writing to out/, if
    the tree has changes that are not committed.
    """
    name = path.stem if path.stem in BY_NAME and path.resolve() == record_path(path.stem) else None
    changes = uncommitted() if name else []
    place = ROOT / "out" / path.name if changes else path
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = place.with_suffix(".tmp")
    temporary.write_text(render(report), encoding="utf-8")
    temporary.replace(place)
    print(f"wrote {place}")
    if changes:
        raise ValueError(
            f"{name} is not recorded: {changes[0]} is not committed; its numbers are in {place}"
        )
    if name:
        run = describe_run(packages)
        known = {"commit": run["commit"], "date": run["date"], "versions": run["versions"]}
        making = making_at(name, SourceTree(ROOT), machine=machine or describe_machine(), **known)
        note(name, making if whole else replace(making, sources=None))


def making_at(name: str, tree: SourceTree, **known: Any) -> Making:
    """The making of a record's file by the programs of a clean tree."""
    return Making(
        content=content_of(name), sources=tree.fingerprint(find_record(name).modules), clean=True,
        files=hash_files(name, tree), **known,
    )  # fmt: skip


def content_of(name: str) -> str:
    """Hash of a record's file, and of the tables that belong to it."""
    record = find_record(name)
    return digest(hash_bytes((ROOT / path).read_bytes()) for path in (record.path, *record.tables))


def hash_files(name: str, tree: SourceTree) -> dict[str, str]:
    """Path -> hash of the files that a record's programs read."""
    found = {x for pattern in find_record(name).files for x in tree.root.glob(pattern)}
    return {
        str(path.relative_to(tree.root)): hash_bytes(path.read_bytes()) for path in sorted(found)
    }


def note(name: str, making: Making) -> None:
    """Put a making into the ledger."""
    entries = {**_entries(), name: {k: v for k, v in asdict(making).items() if v or v is False}}
    text = json.dumps({key: entries[key] for key in sorted(entries)}, indent=1) + "\n"
    LEDGER.write_text(text, encoding="utf-8")


def making_of(name: str) -> Making:
    """What the ledger says of a record. Raises ValueError if it has none of it."""
    found = _entries().get(find_record(name).name)
    if found is None:
        raise ValueError(f"lab/ledger.json has no {name}: python -m lab.records stamp {name}")
    return Making(**found)


def state_of(name: str, tree: SourceTree) -> str:
    """CURRENT, OLDER than this tree, UNKNOWN or EDITED."""
    making = making_of(name)
    if making.content != content_of(name):
        return EDITED
    if making.sources is None:
        return UNKNOWN
    same = making.sources == tree.fingerprint(find_record(name).modules)
    return CURRENT if same and making.files == hash_files(name, tree) else OLDER


def stale(tree: SourceTree) -> list[str]:
    """Names of the records that are not of this tree's code."""
    return [record.name for record in RECORDS if state_of(record.name, tree) != CURRENT]


def uncommitted() -> list[str]:
    """Paths with changes that are not committed; records and their ledger do not count."""
    mine = {record.path for record in RECORDS} | {str(LEDGER.relative_to(ROOT))}
    lines = _git("status", "--porcelain", "--untracked-files=all").splitlines()
    return [line[3:] for line in lines if line[3:] not in mine]


@contextmanager
def tree_at(commit: str) -> Iterator[SourceTree]:
    """The project as it was at a commit. Raises ValueError for one that is not in the history."""
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode:
        raise ValueError(f"the history has no commit {commit!r}")
    with tempfile.TemporaryDirectory(prefix="fa4-tree-") as folder:
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(folder)  # git's own
        yield SourceTree(Path(folder))


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ValueError(f"git {arguments[0]} failed: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout


def _entries() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(LEDGER.read_text("utf-8")) if LEDGER.exists() else {}
    return found


def _stamp(options: argparse.Namespace) -> None:
    """Note the making of a file that came from elsewhere."""
    known = {"date": options.date, "machine": options.machine}
    with tree_at(options.commit) as tree:
        note(options.name, making_at(options.name, tree, commit=options.commit, **known))


def _remake() -> None:
    """Run the commands of the stale records that tests hold to this code."""
    for name in stale(SourceTree(ROOT)):
        record = find_record(name)
        if record.needs is None:
            print(f"{name}: {record.command}", flush=True)
            _, *arguments = shlex.split(record.command)
            subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True)


def main() -> None:
    """List the records with their states, remake what a CPU computes, or note a file's making."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    steps = parser.add_subparsers(dest="step")
    steps.add_parser("list", help="every record, and how old it is (default)")
    steps.add_parser("remake", help="make anew what tests hold to this code and is older")
    stamp = steps.add_parser("stamp", help="note how a file that came from elsewhere was made")
    stamp.add_argument("name", choices=BY_NAME)
    stamp.add_argument("--commit", required=True, help="whose programs made it, unchanged")
    stamp.add_argument("--machine", default=describe_machine())
    stamp.add_argument("--date", help="as 2026-11-22T16:46:54+00:00")
    options = parser.parse_args()
    if options.step == "stamp":
        _stamp(options)
    elif options.step == "remake":
        _remake()
    else:
        tree = SourceTree(ROOT)
        for record in RECORDS:
            print(f"{record.name:26} {state_of(record.name, tree):32} {record.command}")


if __name__ == "__main__":
    main()
