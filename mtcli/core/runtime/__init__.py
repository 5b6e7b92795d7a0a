"""Starts the ranks of a run and the processes of a command, and writes files atomically."""
