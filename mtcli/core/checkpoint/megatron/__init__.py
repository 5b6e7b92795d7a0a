"""Megatron-LM's torch_dist checkpoints, read where they lie."""
