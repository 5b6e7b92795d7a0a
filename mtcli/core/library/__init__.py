"""The Python interface, as docs/reference/python.md lists it: models, datasets and plans."""
