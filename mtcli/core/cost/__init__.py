"""What a run costs before it starts: bytes, seconds, FLOPs, and the search for a better layout."""
