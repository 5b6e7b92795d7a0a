"""GPU kernels, a file per operation: its reference in plain torch, Triton kernels, wrapper."""
