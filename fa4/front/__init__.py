"""From a call of the public functions to the kernel, on a GPU or in the emulator.

`choice` picks the implementation, `kernel` reads a call and runs it, `op` is the torch operator,
`job` measures one call, `prediction` simulates the kernel with its own instruction counts.
"""
