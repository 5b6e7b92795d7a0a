"""Ranks by axis, the parameter table, and each rank's shards. Imports no torch."""
