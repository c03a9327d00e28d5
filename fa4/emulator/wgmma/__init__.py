"""wgmma.mma_async: forms, operands, and how the tensor core of Hopper sums.

Nothing here knows the machine: bytes and register words go in, words come out.
`fa4.emulator.isa.warpgroup_mma` issues, checks and completes the instructions.
"""
