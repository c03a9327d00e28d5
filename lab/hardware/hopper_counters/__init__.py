"""Hardware counters of Hopper kernels, beside their code, the emulator and the simulator."""
