"""What the emulator checks while a kernel runs: races, missing fences, uninitialised reads."""

from fa4.emulator import kept_code

kept_code.prepare()
