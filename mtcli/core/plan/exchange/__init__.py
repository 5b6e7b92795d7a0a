"""What replicas send each other, keep and compute for it in a step: a file per method of [sync]."""
