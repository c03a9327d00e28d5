"""The kernels for Hopper (sm_90a), over the kit of `fa4.sm100`."""
