"""What the peak of one step counts: gradients wherever they lie."""

import torch
from torch import Tensor, nn

from pipebench.harness.memory import measure_memory

CPU = torch.device("cpu")
WIDTH = 64


def _step(layer: nn.Linear, x: Tensor) -> None:
    layer(x).sum().backward()


def test_gradients_that_a_step_allocates_count_once() -> None:
    layer, x = nn.Linear(WIDTH, WIDTH, bias=False), torch.ones(2, WIDTH)
    memory = measure_memory(lambda: _step(layer, x), list(layer.parameters()), [], 0, CPU)
    assert memory.parameters_bytes == 4 * WIDTH * WIDTH
    assert memory.gradients_bytes == memory.parameters_bytes


def test_gradients_in_a_buffer_that_an_engine_keeps_count_as_the_buffer() -> None:
    layer, x = nn.Linear(WIDTH, WIDTH), torch.ones(2, WIDTH)
    buffer = torch.zeros(WIDTH * WIDTH + WIDTH + 5)
    layer.weight.grad = buffer[: WIDTH * WIDTH].view(WIDTH, WIDTH)
    layer.bias.grad = buffer[WIDTH * WIDTH : -5]
    memory = measure_memory(lambda: _step(layer, x), list(layer.parameters()), [], 0, CPU)
    assert memory.gradients_bytes == buffer.nbytes
