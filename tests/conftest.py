"""Property tests draw the same examples on every run and write nothing into the tree."""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, database=None, deadline=None, max_examples=50)
settings.load_profile("repeatable")
