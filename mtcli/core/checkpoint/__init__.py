"""Checkpoints: named tensors cut into rectangles, ours and Hugging Face's, read from any layout."""
