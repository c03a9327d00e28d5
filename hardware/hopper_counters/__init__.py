"""Hardware counters of Hopper kernels, beside what their code, the emulator and the simulator say."""
