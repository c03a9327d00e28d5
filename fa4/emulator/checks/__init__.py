"""What the emulator checks while a kernel runs: races, missing fences, uninitialised reads."""
