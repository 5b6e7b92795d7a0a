"""A file per evaluation task."""
