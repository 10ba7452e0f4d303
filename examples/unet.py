"""A small U-Net (Ronneberger et al. 2015) that takes noise off images.

On its way down each layer leaves its output for the layer of the same size on the way up. As layers of a sequence they
say so: `stashes` names what a layer returns besides its output, `pops` what it is called with besides its input.
"""

import torch
from torch import nn
from torch.nn import functional as F


def convolutions(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.GroupNorm(4, outputs),
        nn.SiLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.GroupNorm(4, outputs),
        nn.SiLU(),
    )


class Down(nn.Module):
    def __init__(self, inputs, outputs, level):
        super().__init__()
        self.stashes = (f"level {level}",)
        self.convolutions = convolutions(inputs, outputs)

    def forward(self, x):
        x = self.convolutions(x)
        return F.max_pool2d(x, 2), x


class Up(nn.Module):
    def __init__(self, inputs, outputs, level):
        super().__init__()
        self.pops = (f"level {level}",)
        self.grow = nn.ConvTranspose2d(inputs, outputs, 2, stride=2)
        self.convolutions = convolutions(2 * outputs, outputs)

    def forward(self, x, skip):
        return self.convolutions(torch.cat((self.grow(x), skip), 1))


def unet(width=8, levels=3):
    widths = [width * 2**level for level in range(levels + 1)]
    down = [Down(widths[level - 1] if level else 1, widths[level], level) for level in range(levels)]
    up = [Up(widths[level + 1], widths[level], level) for level in reversed(range(levels))]
    return nn.Sequential(*down, convolutions(widths[-2], widths[-1]), *up, nn.Conv2d(width, 1, 1))


def noisy_discs(step, batch, seed, size=16):
    """Return images of a disc each, with noise and without."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    centre = size * torch.rand(batch, 2, 1, 1, generator=generator)
    radius = size / 8 * (1 + torch.rand(batch, 1, 1, generator=generator))
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    discs = (torch.hypot(rows - centre[:, 0], columns - centre[:, 1]) < radius).float()[:, None]
    return discs + 0.5 * torch.randn(batch, 1, size, size, generator=generator), discs
