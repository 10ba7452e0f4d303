"""The built-in pipeline engine. It knows layers, losses and schedules, and no particular model."""
