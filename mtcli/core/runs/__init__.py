"""What `mtcli runs` does: find runs, sum them up, compare, draw and watch them, and free space."""
