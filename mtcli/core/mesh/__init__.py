"""Ranks by axis, the parameter table, and each rank's shards of parameters. Imports no torch."""
