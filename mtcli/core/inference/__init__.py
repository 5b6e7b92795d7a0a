"""Opens a checkpoint as a model for forward passes, scores and generated text."""
