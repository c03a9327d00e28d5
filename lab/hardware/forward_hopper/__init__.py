"""The forward kernel's architecture-neutral parts on a Hopper GPU: work tiles, masks, exponentials.

    python -m lab.hardware.forward_hopper.make_suite out/forward_hopper
    python3 -m lab.hardware.forward_hopper.run_there out/forward_hopper RESULTS    (on the GPU)
    python -m lab.hardware.forward_hopper.compare out/forward_hopper RESULTS

The first compiles the test kernels for sm_90a and draws inputs; the second needs only NumPy and the
driver; the third compares what the GPU gave with the definitions and with the emulator, and writes
lab/hardware/results/forward_hopper.json.

`skeleton` runs the whole kernel there, without a tensor core or with one of plain instructions.
"""
