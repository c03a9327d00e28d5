"""The kernels before and behind the backward kernel on a Hopper GPU, compiled for it as they are.

    python -m lab.hardware.backward_hopper.make_suite out/backward_hopper
    python3 -m lab.hardware.backward_hopper.run_there out/backward_hopper FILE.npz     (on the GPU)
    python -m lab.hardware.backward_hopper.compare out/backward_hopper FILE.npz

The first compiles them for sm_90a, draws inputs and runs the emulator; the second launches them on
the same inputs, and on a large call that it times beside torch's copy of as many bytes; it needs
NumPy, torch and the driver. The third compares all memory of each call with the definitions and
with the emulator, and writes lab/hardware/results/backward_hopper.json.
"""
