"""Which rank holds what: the two grids, the parameter table and its shards. Imports no torch."""
