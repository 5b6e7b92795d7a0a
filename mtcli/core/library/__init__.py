"""The Python interface, as docs/python.md lists it: models, datasets and plans."""
