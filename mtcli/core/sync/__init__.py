"""What data-parallel replicas exchange, and when."""
