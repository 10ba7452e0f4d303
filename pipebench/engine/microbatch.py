"""How a mini-batch is cut into micro-batches, and one of any size into passes of them."""


def micro_batch_sizes(num_samples: int, num_micro_batches: int) -> list[int]:
    """Return M sizes that add up to the mini-batch and differ by at most one, larger ones first."""
    small, larger = divmod(num_samples, num_micro_batches)
    return [small + (index < larger) for index in range(num_micro_batches)]


def passes_of(num_samples: int, num_micro_batches: int, most_samples: int) -> list[list[int]]:
    """Return the micro-batches' sizes of as few passes as do, each of at most M micro-batches of `most_samples`.

    Only the last pass may be shorter, and only its last micro-batch smaller.
    """
    whole, rest = divmod(num_samples, most_samples)
    sizes = [most_samples] * whole + ([rest] if rest else [])
    return [sizes[begin : begin + num_micro_batches] for begin in range(0, len(sizes), num_micro_batches)]
