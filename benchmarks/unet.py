"""A small U-Net for CT slices with seeded random weights: its cost is that of a trained one, its masks mean nothing."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

WIDTHS = (8, 16, 32)  # channels of each level
CLASSES = 3
HOUNSFIELD = 1000.0


def build() -> torch.nn.Module:
    """int16 `[N, H, W]` in Hounsfield units to what a worklist shows: `pixels` int32 `[N, CLASSES]`, how many pixels
    each class has, and `score` float32 `[N, CLASSES]`, the highest probability of each. H and W divide by 4."""
    import torch
    from torch import nn

    def block(wide: int, narrow: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(wide, narrow, 3, padding=1), nn.ReLU(), nn.Conv2d(narrow, narrow, 3, padding=1), nn.ReLU()
        )

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.ModuleList(block(a, b) for a, b in itertools.pairwise((1, *WIDTHS)))
            self.rise = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in itertools.pairwise(WIDTHS))
            self.up = nn.ModuleList(block(2 * a, a) for a in WIDTHS[:-1])
            self.head = nn.Conv2d(WIDTHS[0], CLASSES, 1)

        def forward(self, slices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = slices.to(torch.float32).unsqueeze(1) / HOUNSFIELD  # only narrow bytes cross to the device
            levels = list[torch.Tensor]()
            for down in self.down:
                x = down(nn.functional.max_pool2d(x, 2) if levels else x)
                levels.append(x)
            for rise, up, level in zip(reversed(self.rise), reversed(self.up), reversed(levels[:-1]), strict=True):
                x = up(torch.cat([level, rise(x)], 1))
            logits = self.head(x)  # [N, CLASSES, H, W]
            mask = logits.argmax(1)
            pixels = torch.stack(
                [(mask == one).to(torch.int32).sum((1, 2), dtype=torch.int32) for one in range(CLASSES)], 1
            )
            return pixels, logits.softmax(1).amax((2, 3))

    torch.manual_seed(0)
    network = UNet()
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.kaiming_normal_(layer.weight)
    return network.eval()
