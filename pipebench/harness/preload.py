"""Imported once by the process that workers are forked from, so that none of them pays for it again.

The first operation on the meta device and the first optimizer import hundreds of modules each (1 s).
Nothing here may start a thread or touch CUDA: neither survives a fork.
"""

import gc

import torch
import torch.distributed
from torch.nn import functional

import pipebench.harness.profile
import pipebench.harness.worker
import pipebench.peers.built_in  # noqa: F401
from pipebench.harness.orphans import end_with_parent

functional.linear(torch.empty(1, 1, device="meta"), torch.empty(1, 1, device="meta"))
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
# What was imported stays: each collection in a worker would walk all of it, 0.25 s of a core before it measures.
gc.collect()
gc.freeze()
end_with_parent()
