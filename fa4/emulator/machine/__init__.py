"""The machine that executes programs: warps, barriers, memories, asynchronous units."""
