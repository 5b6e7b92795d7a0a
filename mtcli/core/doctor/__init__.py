"""Examines the machine, the installation, devices and ranks for `mtcli doctor`."""
