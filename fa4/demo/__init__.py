"""`fa4 demo`: FA4's algorithm on the queries, keys and values of a real model, against the oracle.

In order: `inputs` finds the arrays (a text through `minilm`, or a file), `measure` runs one layer
and compares it with its budget, `rescales` counts how often the running maximum moves, `speed` asks
the simulator, `kernel` runs one head through the compiled kernel in the emulator, `report` puts it
together and writes it, `figure` draws it.
"""
