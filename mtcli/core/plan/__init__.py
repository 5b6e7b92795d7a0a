"""Predicts the memory and time of a run, and searches for better layouts."""
