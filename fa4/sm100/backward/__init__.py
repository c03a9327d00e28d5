"""The backward kernels for B200 and B300: row statistics, gradients, dQ in 16 bits."""
