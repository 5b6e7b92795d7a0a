"""Writes GGUF, the format that llama.cpp runs: tensors, metadata and vocabulary in one file."""
