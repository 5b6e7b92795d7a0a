"""Opens a checkpoint as a model: forward passes, scores, generated text."""
