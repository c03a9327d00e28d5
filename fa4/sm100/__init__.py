"""The CuTe-DSL kernels for Blackwell (sm_100a), built from the plan."""
