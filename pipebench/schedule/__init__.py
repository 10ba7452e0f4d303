"""Pipeline schedules as data: built, checked, simulated and bounded without torch."""
