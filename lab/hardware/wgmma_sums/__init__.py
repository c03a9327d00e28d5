"""How Hopper's tensor core sums: wgmma and mma.sync on designed and random operands.

    python3 -m lab.hardware.wgmma_sums.run_there FOLDER      # GPU; needs NumPy and the driver
    python -m lab.hardware.wgmma_sums.compare FOLDER         # with the package's model

Inputs are drawn by `operands` from the names of the cases, on either machine alike; the GPU's
outputs are compared bit for bit.
"""
