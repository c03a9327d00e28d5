"""The emulator compared with a Hopper GPU, on the instructions that Hopper shares with Blackwell.

    python -m lab.hardware.emulator_hopper.make_suite out/emulator_hopper/suite.npz
    python3 -m lab.hardware.emulator_hopper.run_there out/emulator_hopper/suite.npz RESULTS (GPU)
    python -m lab.hardware.emulator_hopper.compare RESULTS

The first writes PTX programs, cubins and inputs; the second needs only NumPy and the driver; the
third runs the same programs on the emulator and writes lab/hardware/results/emulator_hopper.json.
"""
