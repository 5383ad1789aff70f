"""Decoding of one token of a whole model; so far weights in memory (`weights`) and the kernel (`kernels`)."""
