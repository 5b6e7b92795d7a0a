"""Exchanges gradients and weights between data-parallel replicas."""
