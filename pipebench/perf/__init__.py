"""`python -m pipebench.perf`: the project's own speed targets, and whether its points became slower since last time."""
