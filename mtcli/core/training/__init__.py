"""A training run: the loop, the step, its state, and the records that it leaves."""
