"""How a mini-batch is cut into micro-batches."""


def micro_batch_sizes(num_samples: int, num_micro_batches: int) -> list[int]:
    """Return M sizes that add up to the mini-batch and differ by at most one, larger ones first."""
    small, larger = divmod(num_samples, num_micro_batches)
    return [small + (index < larger) for index in range(num_micro_batches)]
