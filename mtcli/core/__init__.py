"""Everything mtcli does; the commands are thin wrappers around it."""
