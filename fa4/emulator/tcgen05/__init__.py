"""Tensor core and tensor memory of SM100 (PTX ISA 9.7.16), as pure functions of NumPy arrays.

Shared memory of a CTA is a uint8 array, indexed by the address in its shared window. Tensor memory
of a CTA is a uint32 array (128 lanes, 512 columns). An instruction is first planned (which bytes,
lanes and columns it touches), then executed on the arrays; who waits for whom is decided elsewhere.

descriptors -> operands -> mma        the matrix multiply
scaled                                its block scaling
tmem_access                           tcgen05.ld, tcgen05.st
tmem_copy                             tcgen05.cp, tcgen05.shift
tmem_allocator                        tcgen05.alloc, tcgen05.dealloc
"""
