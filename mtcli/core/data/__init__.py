"""The data rooms: text to tokens (`preprocess`), tokens to samples, samples to batches."""
