"""The backward kernels on a Hopper GPU: those around the main one as they are (`prepost`), and the
main one with plain instructions in place of the tensor core (`skeleton`)."""
