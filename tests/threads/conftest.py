"""One torch thread for each of our threads: two cores carry the whole ring."""

import torch

torch.set_num_threads(1)
