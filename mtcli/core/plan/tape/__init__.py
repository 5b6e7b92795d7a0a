"""Predicts the bytes of a forward and its backward, op by op, without tensors or torch."""
