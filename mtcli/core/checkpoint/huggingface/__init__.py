"""Reads and writes Hugging Face folders: a map of names per family, the config, and a reader."""
