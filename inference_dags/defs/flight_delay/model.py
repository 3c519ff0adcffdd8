"""The flight delay network: embeddings and standardised numbers through a small MLP."""

from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from inference_dags.defs.flight_delay.land import CATEGORICAL, NUMERIC

FOLDER = Path(__file__).parent
HIDDEN = (256, 256, 128)
EMBEDDING = 96


def vocabulary(name: str) -> list[str]:
    """The known values of a categorical column; a value's id is its position."""
    return (FOLDER / f"{name}s.txt").read_text(encoding="utf-8").splitlines()


class FlightDelay(nn.Module):
    """Probability that a flight arrives more than 15 minutes late.

    Standardisation is inside, as buffers, so the inputs are the columns as they stand in the Parquet file.

    The hazard for INT8: the first Gemm reads one tensor in which the embeddings stay within a few hundredths
    while standardised snow and precip reach 20 to 50. A scale that spans the extremes rounds most of the
    embeddings to zero; clip at a high percentile, or leave that Gemm in float.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor, std: Tensor, carriers: int, origins: int, dests: int) -> None:
        super().__init__()
        self.register_buffer("mean", mean)  # [K]
        self.register_buffer("std", std)  # [K]
        self.carrier = nn.Embedding(carriers, EMBEDDING)
        self.origin = nn.Embedding(origins, EMBEDDING)
        self.dest = nn.Embedding(dests, EMBEDDING)
        for table in (self.carrier, self.origin, self.dest):
            nn.init.normal_(table.weight, std=0.01)  # a rare value stays close to no opinion
        widths = (len(mean) + 3 * EMBEDDING, *HIDDEN)
        layers: list[nn.Module] = []
        for wide_in, wide_out in zip(widths, HIDDEN, strict=False):
            layers += [nn.Linear(wide_in, wide_out), nn.ReLU()]
        self.mlp = nn.Sequential(*layers, nn.Linear(HIDDEN[-1], 1))

    def logit(self, numeric: Tensor, carrier: Tensor, origin: Tensor, dest: Tensor) -> Tensor:
        """As `forward`, before the sigmoid."""
        standard = (numeric - self.mean) / self.std
        known = torch.cat([standard, self.carrier(carrier), self.origin(origin), self.dest(dest)], dim=1)
        return cast(Tensor, self.mlp(known)).squeeze(1)

    def forward(self, numeric: Tensor, carrier: Tensor, origin: Tensor, dest: Tensor) -> Tensor:
        """numeric float32 [N, K] in the order of NUMERIC; ids int32 [N]; returns float32 [N] in 0..1."""
        return torch.sigmoid(self.logit(numeric, carrier, origin, dest))


def build() -> nn.Module:
    """The trained network in eval mode, from weights.safetensors and the vocabularies beside this file."""
    carriers, origins, dests = (len(vocabulary(name)) for name in CATEGORICAL)
    network = FlightDelay(torch.zeros(len(NUMERIC)), torch.ones(len(NUMERIC)), carriers, origins, dests)
    network.load_state_dict(load_file(FOLDER / "weights.safetensors"))
    return network.eval()
