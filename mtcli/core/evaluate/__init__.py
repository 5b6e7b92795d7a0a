"""Evaluates models: texts become requests, packed batches, scores and metrics."""
