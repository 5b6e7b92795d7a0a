"""Turns text into tokens (`preprocess`), tokens into samples, samples into batches."""
