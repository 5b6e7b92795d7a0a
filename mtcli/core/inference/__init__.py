"""A checkpoint opened as a model: forward passes, scores, generated text."""
