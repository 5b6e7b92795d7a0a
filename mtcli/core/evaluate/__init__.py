"""Evaluation: texts become requests, requests become packed batches, scores become metrics."""
