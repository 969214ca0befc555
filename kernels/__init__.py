"""Contractions: micro-kernels for each instruction set, packing, the generator that wraps them, vendor rows and the selection table."""
