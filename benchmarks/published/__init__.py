"""Reads, predicts and scores published runs, for validate_plan.py and fit_physics.py."""
