"""One file per parallel axis, over process groups (groups.py) and collectives (collectives.py)."""
