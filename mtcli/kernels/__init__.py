"""One file per operation: reference, Triton kernel, wrapper, in that order."""
