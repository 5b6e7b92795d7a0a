"""What `mtcli shard` does: checkpoints to our format and to Hugging Face's, verified."""
