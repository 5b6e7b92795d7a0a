"""The checkpoint format: named tensors in boxes, ours and Hugging Face's, read from any layout."""
