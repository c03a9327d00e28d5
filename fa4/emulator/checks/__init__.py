"""What the emulator checks while a kernel runs: races, missing fences, uninitialised reads."""

from pathlib import Path

from fa4.compiled_code import prepare

_ROOT = Path(__file__).parent.parent
prepare([_ROOT / "layout.py", *_ROOT.glob("checks/*.py"), *_ROOT.glob("machine/*.py")])
