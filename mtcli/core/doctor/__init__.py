"""What `doctor` does: examines the machine, the installation, devices and ranks."""
