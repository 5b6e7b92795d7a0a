"""Converts checkpoints to our format and Hugging Face's, and verifies them (`mtcli shard`)."""
