"""Reads torchtitan's checkpoints (torch.distributed.checkpoint), and names tensors as they do."""
