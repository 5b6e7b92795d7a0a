"""Profiles a step's time and memory, measured vs planned."""
