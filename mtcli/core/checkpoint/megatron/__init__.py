"""Reads Megatron-LM's torch_dist checkpoints in place."""
