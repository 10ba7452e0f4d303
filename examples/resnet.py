"""A small residual network (He et al. 2016) for images, and images to learn from that are made on the spot."""

import torch
from torch import nn
from torch.nn import functional as F


class BasicBlock(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def resnet(width=16, blocks=2, classes=10):
    """Stem, three groups of blocks that halve the image and double the channels, classifier."""
    layers = [nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())]
    inputs = width
    for group in range(3):
        outputs = width * 2**group
        for block in range(blocks):
            layers.append(BasicBlock(inputs, outputs, stride=2 if group > 0 and block == 0 else 1))
            inputs = outputs
    layers.append(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)))
    return nn.Sequential(*layers)


def stripes(step, batch, seed, classes=10, size=16):
    """Noisy stripes; their direction is the class."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    labels = torch.randint(classes, (batch,), generator=generator)
    angle = (labels * torch.pi / classes)[:, None, None]
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    pictures = torch.sin(rows * torch.cos(angle) + columns * torch.sin(angle))
    noise = torch.randn(batch, 3, size, size, generator=generator)
    return pictures[:, None] + 0.5 * noise, labels
