"""The transformer: what one pipeline stage computes on one micro-batch."""
