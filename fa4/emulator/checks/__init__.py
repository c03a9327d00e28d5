"""What the emulator checks while a kernel runs: races, missing fences, uninitialised reads."""

from pathlib import Path

from fa4.emulator.stale_code import drop_stale

drop_stale(Path(__file__).parent.parent)
