"""Core-sets: proxies of sequences, facility location over them, and the other ways to choose."""
