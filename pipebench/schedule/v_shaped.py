"""Schedules whose ranks hold two half-size stages each, folded like a V: rank r has stages r and 2K-1-r."""
