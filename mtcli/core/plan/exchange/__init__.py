"""Predicts what replicas send, keep and compute in a step: a file per method of [sync]."""
