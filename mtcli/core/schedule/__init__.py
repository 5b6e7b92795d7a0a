"""Pipeline schedules as data without torch, which plan simulates, training runs and profile
draws."""
