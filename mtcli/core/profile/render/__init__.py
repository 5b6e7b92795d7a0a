"""Renders a profile or a finished run as text, HTML and pictures."""
