"""A fuzzer of the commands: command lines made from their own option tables, and what must hold.

None may print a traceback, run longer than SECONDS, end with another code than 0, 1 or 2, refuse in
more than one line, or leave a file that is not whole. Commands run in a worker process, which is
replaced when it hangs or dies, so that the command line at fault is named.
"""

from __future__ import annotations

import json
import os
import random
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer

from tests.commands.fuzz_values import make_files, make_places, value_of

ROOT = Path(__file__).resolve().parents[2]
BENCH = "{files}/bench.json"
SECONDS = 60.0  # of processor time, which other programs on the machine do not lengthen
WALL_SECONDS = 240.0  # for what waits instead of computing
REFUSALS = 12  # a refusal may take so many times less; imports count, in a new worker
PARTIAL = (".partial", ".part", ".tmp")

# How often each command is drawn, and what makes a call of it cheap.
COMMANDS: Mapping[tuple[str, ...], tuple[int, tuple[str, ...]]] = {
    ("predict",): (12, ()),
    ("sweep",): (9, ("--set", "head_dim=64", "--jobs", "1")),
    ("ablate",): (6, ("--seqlen", "1k")),
    ("trace",): (8, ("--kv-tiles", "2")),
    ("roofline",): (8, ()),
    ("design",): (3, ("--limit", "2", "--jobs", "1", "--seqlen", "1k")),
    ("explore",): (2, ("--quick", "--machine", "h200")),
    ("figures",): (3, ("smem",)),
    ("explain",): (8, ()),
    ("machines",): (5, ()),
    ("validate",): (6, ("--measurements", "{files}/good.csv")),
    ("calibrate",): (4, ("--measurements", "{files}/good.csv", "--evaluations", "2")),
    ("generations",): (6, ("--seqlen", "64")),
    ("run",): (14, ("--random", "1,1,9,16")),
    ("emulate",): (12, ("{files}/add.ptx", "--grid", "1", "--block", "32", "--arg",
                        "x:f32[64]=random", "--arg", "y:f32[64]=zeros", "--arg", "u32=32")),
    ("compile",): (2, ()),
    ("cache", "ls"): (2, ()),
    ("cache", "clear"): (3, ()),
    ("cache", "warm"): (2, ("--arch", "sm_90a")),
    ("doctor",): (2, ()),
    ("demo",): (3, ("--input", "{files}/in.npz", "--no-kernel")),
    ("verify",): (3, ("--max-examples", "1", "--only", "plain")),
    ("bench",): (3, ()),
    ("distributed", "plan"): (3, ("--seqlen", "1k")),
    ("distributed", "predict"): (4, ("--seqlen", "8k", "--gpus", "4")),
    ("distributed", "check"): (3, ("--seqlen", "256", "--heads", "4")),
    ("distributed", "run"): (1, ("--seqlen", "16", "--gpus", "1", "--method", "zigzag")),
    ("distributed", "bench"): (1, ("--seqlen", "16", "--gpus", "1", "--method", "zigzag")),
}  # fmt: skip
# Options that ask for as much work as one likes, or for a browser: (command, option).
ENDLESS = {
    ("verify", "--max-examples"), ("verify", "--timeout"), ("verify", "--jobs"),
    ("calibrate", "--evaluations"), ("run", "--minutes"), ("emulate", "--max-steps"),
    ("emulate", "--seeds"), ("explore", "--open"), ("distributed", "--gpus"),
    ("design", "--limit"), ("design", "--jobs"), ("design", "--dask"),
}  # fmt: skip
# Without these an option is refused before its value is looked at: (command, option) -> words.
ENABLING = {
    ("run", "--schedule"): ("--impl", "emulator"), ("bench", "--figure"): ("--from", BENCH),
    ("bench", "--deterministic"): ("--backward",), ("sweep", "--csv"): ("--json",),
}  # fmt: skip
# A call of the compiler takes seconds; twelve of them are too many here.
FIXED = {("cache", "warm", "--arch"): "sm_90a"}


@dataclass(frozen=True)
class Option:
    """An option or argument of a command, as its table has it."""

    flags: tuple[str, ...]
    takes_value: bool
    repeatable: bool
    is_argument: bool
    metavar: str


def option_tables() -> dict[tuple[str, ...], list[Option]]:
    """{words of a command: its options and arguments}, of every command that there is."""
    from fa4.cli import build_app

    found: dict[tuple[str, ...], list[Option]] = {}
    group = typer.main.get_command(build_app())
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        parts = getattr(command, "commands", None)
        for words, one in (
            {(name, part): x for part, x in parts.items()}.items()
            if parts
            else [((name,), command)]
        ):
            found[words] = [read_option(parameter) for parameter in one.params]
    return found


def read_option(parameter: Any) -> Option:
    """One row of the table."""
    argument = parameter.param_type_name == "argument"
    return Option(
        flags=(*parameter.opts, *parameter.secondary_opts),
        takes_value=argument or not parameter.is_flag,
        repeatable=not argument and parameter.multiple,
        is_argument=argument,
        metavar=str(getattr(parameter, "metavar", None) or ""),
    )


class Generator:
    """Command lines from a seed."""

    def __init__(self, seed: int, files: Path, commands: tuple[str, ...] = ()) -> None:
        self.random, self.files = random.Random(seed), files
        self.tables = option_tables()
        assert set(self.tables) == set(COMMANDS), "give each command a weight in COMMANDS"
        self.words = [words for words in COMMANDS if not commands or words[0] in commands]

    def line(self) -> list[str]:
        """One command line."""
        rng = self.random
        words = rng.choices(self.words, [COMMANDS[x][0] for x in self.words])[0]
        table = self.tables[words]
        chosen = rng.sample(table, min(len(table), rng.choice((0, 1, 1, 1, 2, 2, 3, 5))))
        given: list[str] = []
        for option in chosen:
            given += self.option(words, option)
            while option.repeatable and rng.random() < 0.4:
                given += self.option(words, option)
        if chosen and rng.random() < 0.04:
            given += self.option(words, chosen[0])
        if rng.random() < 0.03:
            given.append(rng.choice(("--nope", "-x", "extra", "", "--")))
        taken = {flag for option in chosen for flag in option.flags}
        for option in chosen:
            enabling = ENABLING.get((words[0], option.flags[0]), ("",))
            if enabling[0] and enabling[0] not in taken and rng.random() < 0.7:
                given += [word.replace("{files}", str(self.files)) for word in enabling]
        return [*words, *self.cheap(words, chosen), *given]

    def option(self, words: tuple[str, ...], option: Option) -> list[str]:
        """An option with its value, in one of the ways to write it; or an argument."""
        rng, flag = self.random, self.random.choice(option.flags)
        if not option.takes_value:
            return [flag]
        if (*words, flag) in FIXED:
            return [flag, FIXED[(*words, flag)]]
        value = value_of(rng, flag, option.metavar, self.files)
        while (words[0], flag) in ENDLESS and value not in ("1", "2", "3"):
            value = value_of(rng, flag, option.metavar, self.files)
        if option.is_argument:
            return [value]
        return [f"{flag}={value}"] if rng.random() < 0.3 else [flag, value]

    def cheap(self, words: tuple[str, ...], chosen: list[Option]) -> list[str]:
        """What keeps a call cheap, without what was chosen anyway."""
        taken = {flag for option in chosen for flag in option.flags}
        has_argument = any(option.is_argument for option in chosen)
        wanted = [text.replace("{files}", str(self.files)) for text in COMMANDS[words][1]]
        found: list[str] = []
        while wanted:
            text = wanted.pop(0)
            if not text.startswith("--"):
                found += [] if has_argument else [text]
                continue
            value = [wanted.pop(0)] if wanted and not wanted[0].startswith("--") else []
            clash = {"--random": has_argument, "--input": "--text" in taken}.get(text, False)
            found += [] if text in taken or clash else [text, *value]
        return found


class Worker:
    """Runs command lines in a process of its own."""

    def __init__(self, folder: Path, setup: str = "", seconds: float = SECONDS) -> None:
        self.folder, self.setup, self.seconds = folder, setup, seconds
        self.files = folder / "files"
        self.files.mkdir()
        make_files(self.files)
        self.known = snapshot(self.files)
        self.count = 0
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> subprocess.Popen[str]:
        """The process, a new one if there is none."""
        if self.process is None:
            temporary = self.folder / "tmp"
            temporary.mkdir(exist_ok=True)
            environment = os.environ | {
                "FUZZ_SETUP": self.setup, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary),
                "FA4_CACHE_DIR": str(self.folder / "cache"), "OPENBLAS_NUM_THREADS": "1",
                "HOME": str(self.folder), "PYTHONIOENCODING": "utf-8",
            }  # fmt: skip
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.commands.fuzz_worker"], cwd=ROOT, env=environment,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                text=True, start_new_session=True,
            )  # fmt: skip
        return self.process

    def stop(self) -> None:
        """End the process and those that it started."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()
            self.process = None

    def check(self, arguments: list[str]) -> list[str]:
        """What is wrong with what a command line did; [] for nothing."""
        self.count += 1
        place = self.folder / f"{self.count}"
        place.mkdir()
        make_places(place)
        before = snapshot(place)
        answer = self.run(arguments, place)
        tables = tables_of(arguments)
        wrong = judge(answer, self.seconds / REFUSALS) + self.left_behind(
            place, before, answer, tables
        )
        shutil.rmtree(place)
        return [f"fa4 {shlex.join(arguments)[:600]}: {problem}" for problem in wrong]

    def run(self, arguments: list[str], place: Path) -> dict[str, Any]:
        """The worker's answer, or {"problem"} if there came none."""
        process = self.start()
        assert process.stdin is not None and process.stdout is not None
        began, used = time.monotonic(), processor_seconds(process.pid)
        process.stdin.write(json.dumps({"arguments": arguments, "folder": str(place)}) + "\n")
        process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not selector.select(0.5):
                spent = processor_seconds(process.pid) - used
                if spent > self.seconds or time.monotonic() - began > 4 * self.seconds:
                    self.stop()
                    return {"problem": f"it did not end within {self.seconds:g} s"}
        line = process.stdout.readline()
        if not line:
            self.process = None
            process.wait()
            for pipe in (process.stdin, process.stdout):
                pipe.close()
            return {"problem": f"the process died with {process.returncode}"}
        return dict(json.loads(line))

    def left_behind(
        self,
        place: Path,
        before: Mapping[str, Any],
        answer: Mapping[str, Any],
        tables: Collection[str] = (),
    ) -> list[str]:
        """Files that are not whole, or that a refused command left. tables: CSV by another name."""
        wrong = []
        if snapshot(self.files) != self.known:
            wrong.append("it changed a file that it was to read")
            self.known = snapshot(self.files)
        for folder in (self.folder / "tmp", self.folder / "cache"):
            for path in sorted(folder.glob("*")) if folder.is_dir() else ():
                if path.name.startswith("fa4") or path.name.endswith(PARTIAL):
                    wrong.append(f"it left {path.name} in {folder.name}")
                    shutil.rmtree(path, ignore_errors=True)
                    path.unlink(missing_ok=True)
        for name, what in snapshot(place).items():
            if before.get(name) == what or (place / name).is_dir():
                continue
            path, refused = place / name, answer.get("code") == 2
            table = path.suffix == ".csv" or name in tables
            if table and path.is_file() and path.read_bytes().endswith(b"\n"):
                continue  # a sweep that can be continued
            if refused or path.name.endswith(PARTIAL) or not is_whole(path):
                wrong.append(f"it left {name[-60:]!r}, code {answer.get('code')}")
        return wrong


def tables_of(arguments: Sequence[str]) -> set[str]:
    """Files into which a command line has a table written, whatever they are called."""
    after = {following for option, following in pairwise(arguments) if option == "--csv"}
    joined = {one.removeprefix("--csv=") for one in arguments if one.startswith("--csv=")}
    return {os.path.normpath(name) for name in after | joined}


def judge(answer: Mapping[str, Any], refusal_seconds: float = SECONDS) -> list[str]:
    """What is wrong with exit code and output, and with the processor time of a refusal."""
    if "problem" in answer:
        return [answer["problem"]]
    if answer["fault"]:
        return [f"an exception: {answer['fault'][-1500:]}"]
    wrong = []
    for stream in ("out", "err"):
        for mark in ("Traceback (most recent call last)", "Exception ignored in", "Warning: "):
            if mark in answer[stream]:
                wrong += [f"{mark} in std{stream}: {answer[stream][-1500:]}"]
    if answer["code"] not in (0, 1, 2):
        wrong.append(f"exit code {answer['code']}: {answer['err'][-300:]}")
    lines = [line for line in answer["err"].splitlines() if line.startswith("fa4: error: ")]
    if answer["code"] == 2:
        last = (answer["err"].splitlines() or [""])[-1]
        if len(lines) != 1 or last != lines[0] or not lines[0].removeprefix("fa4: error: ").strip():
            wrong.append(f"refused without one clear line: {answer['err'][-300:]!r}")
        if answer["seconds"] > refusal_seconds:
            wrong.append(f"refused after {answer['seconds']:.1f} s: {lines[-1:]}")
    elif lines:
        wrong.append(f"an error with exit code {answer['code']}: {lines[0][:300]}")
    return wrong


def snapshot(folder: Path) -> dict[str, Any]:
    """{path: what tells a change} of everything in a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        found[str(path.relative_to(folder))] = (status.st_mode, status.st_size, status.st_mtime_ns,
                                                status.st_ino)  # fmt: skip
    return {name: x[0] if Path(folder / name).is_dir() else x for name, x in found.items()}


def is_whole(path: Path) -> bool:
    """Can the file be read to its end as what its name says?"""
    if not path.is_file():
        return False
    content = path.read_bytes()
    kind = path.suffix.lower()
    try:
        if kind == ".json" or content.startswith(b"{"):  # some take any name for their JSON
            json.loads(content)
            return True
        if kind == ".npz":
            return zipfile.ZipFile(path).testzip() is None
        if kind == ".safetensors":
            from safetensors.numpy import load_file

            load_file(path)
        if kind == ".toml":
            content.decode("utf-8")
            return content.endswith(b"\n") or b"[costs]" in content
    except Exception:
        return False
    ends = {".png": b"IEND\xaeB`\x82", ".svg": b"</svg>\n", ".csv": b"\n", ".html": b"</html>\n"}
    return bool(content) and content.endswith(ends.get(kind, b""))


def processor_seconds(pid: int) -> float:
    """Processor time of a process and the children it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def faults(seed: int, count: int, folder: Path, commands: tuple[str, ...] = ()) -> Iterator[str]:
    """Everything that is wrong with `count` command lines."""
    worker = Worker(folder)
    generator = Generator(seed, worker.files, commands)
    try:
        for _ in range(count):
            yield from worker.check(generator.line())
    finally:
        worker.stop()
