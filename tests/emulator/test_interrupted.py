"""What an exception in the middle of the emulator's own work leaves: a time limit of pytest's."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc
import llvmlite.binding as llvm
from fa4.emulator import run_ptx

HEAD = ".version 8.8\\n.target sm_90a\\n.address_size 64\\n.visible .entry k() {.reg .b32 %r<3>;"
finalize = llvm.ExecutionEngine.finalize_object

def interrupted(self):
    finalize(self)
    raise KeyboardInterrupt

llvm.ExecutionEngine.finalize_object = interrupted
try:
    run_ptx(HEAD + " mov.u32 %r1, %tid.x; add.u32 %r2, %r1, 1; ret; }", [])
except KeyboardInterrupt:
    gc.collect()
llvm.ExecutionEngine.finalize_object = finalize
for number in range(20):
    run_ptx(HEAD + f" mov.u32 %r1, %tid.x; add.u32 %r2, %r1, {number}; ret; }}", [])
print("still here")
"""


def test_a_compilation_that_is_interrupted() -> None:
    """The process goes on; the engine's memory stays, as that of all others does."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=200
    )
    assert done.stdout == "still here\n" and done.returncode == 0, done.stderr[-2000:]
