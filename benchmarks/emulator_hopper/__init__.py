"""The emulator compared with a Hopper GPU, on the instructions that Hopper shares with Blackwell.

    python -m benchmarks.emulator_hopper.make_suite out/emulator_hopper
    python3 -m benchmarks.emulator_hopper.run_there out/emulator_hopper RESULTS    (on the GPU)
    python -m benchmarks.emulator_hopper.compare RESULTS

The first writes PTX programs, cubins and inputs; the second needs only NumPy and the driver; the
third runs the same programs on the emulator and writes benchmarks/results/emulator_hopper.json.
"""
