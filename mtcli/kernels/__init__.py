"""GPU kernels, one file per operation: a reference in plain torch, Triton kernels, and a wrapper
that chooses."""
