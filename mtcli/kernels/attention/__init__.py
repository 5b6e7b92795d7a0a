"""Attention kernels: flash, vendor libraries, GEMMs on CPU, merging, and masked softmax."""
