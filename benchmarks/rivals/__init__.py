"""Other implementations of the operations, other models, and SPIN without our kernels."""
