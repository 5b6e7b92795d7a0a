"""Update rules and learning-rate curves."""
