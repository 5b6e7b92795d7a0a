"""Hugging Face families, one declarative file each; `registry.py` lists them."""
