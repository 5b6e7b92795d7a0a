"""Measures a step's memory by running any rank's real stages on fake tensors."""
