"""Start workers, measure one point after another, record what they deliver."""
