"""Reads what compilers made of a kernel: PTX, cubins and machine code. Runs nothing."""
