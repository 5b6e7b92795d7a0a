"""Pipeline schedules as torch-free data: planned, simulated, executed and profiled alike."""
