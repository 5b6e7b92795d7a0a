"""Hugging Face folders: a map per family, the config, and a reader."""
