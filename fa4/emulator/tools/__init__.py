"""What looks at kernels and runs from outside: traces, seeds, planted faults, descriptions."""
