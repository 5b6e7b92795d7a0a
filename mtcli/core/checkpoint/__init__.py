"""Reads and writes checkpoints: named tensors in boxes, ours, Hugging Face's and Megatron's, saved
by any layout."""
