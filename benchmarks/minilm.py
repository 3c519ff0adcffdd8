"""all-MiniLM-L6-v2, a sentence's meaning as 384 numbers, in a few lines of torch: for any weights of that layout.

Held against transformers 5.24 once, on texts of 2 to 256 tokens in one padded batch: cosines of 1.000000, values within
2e-7, by torch and by ONNX Runtime.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LAYERS, HEADS, WIDTH = 6, 12, 384
VOCABULARY = 30_522
MAX_TOKENS = 256  # the model was trained on no longer ones; its table of positions has 512
EPSILON = 1e-12
_LINEAR = {  # this module's names → those of the file
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "mix": "attention.output.dense",
    "widen": "intermediate.dense",
    "narrow": "output.dense",
}
_NORMS = {"mixed": "attention.output.LayerNorm", "narrowed": "output.LayerNorm"}


def build(folder: Path) -> torch.nn.Module:
    """Token ids and attention mask, both int32 or int64 `[N, L]`, to float32 `[N, 384]` of length 1: the mean over the
    tokens where the mask is 1. `folder` holds `model.safetensors`, L is at most 512."""
    import math

    import torch
    from safetensors.torch import load_file
    from torch import nn

    weights = load_file(folder / "model.safetensors")

    def filled(layer: nn.Module, name: str) -> nn.Module:
        layer.load_state_dict({end: weights[f"{name}.{end}"] for end in ("weight", "bias")})
        return layer

    def linear(name: str) -> nn.Module:
        wide, narrow = weights[f"{name}.weight"].shape
        return filled(nn.Linear(narrow, wide), name)

    def norm(name: str) -> nn.Module:
        return filled(nn.LayerNorm(WIDTH, EPSILON), name)

    class Layer(nn.Module):
        def __init__(self, prefix: str) -> None:
            super().__init__()
            self.of = nn.ModuleDict(
                {
                    **{ours: linear(f"{prefix}.{theirs}") for ours, theirs in _LINEAR.items()},
                    **{ours: norm(f"{prefix}.{theirs}") for ours, theirs in _NORMS.items()},
                }
            )

        def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            of = self.of
            query, key, value = (  # [N, HEADS, L, WIDTH / HEADS]
                of[name](x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for name in ("query", "key", "value")
            )
            # Written out: for some engines the fused operator is one that they do not have.
            share = (query @ key.transpose(-1, -2) / math.sqrt(WIDTH / HEADS) + bias).softmax(-1)
            x = of["mixed"](x + of["mix"]((share @ value).transpose(1, 2).flatten(-2)))
            return of["narrowed"](x + of["narrow"](nn.functional.gelu(of["widen"](x))))  # type: ignore[no-any-return]

    class Sentences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Parameter(weights["embeddings.word_embeddings.weight"], requires_grad=False)
            # All tokens are of the first of two types: its vector belongs to every place.
            types, places = (weights[f"embeddings.{name}_embeddings.weight"] for name in ("token_type", "position"))
            self.places = nn.Parameter(places + types[0], requires_grad=False)
            self.first = norm("embeddings.LayerNorm")
            self.layers = nn.ModuleList(Layer(f"encoder.layer.{i}") for i in range(LAYERS))

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            mask = attention_mask.to(torch.float32)
            bias = (1 - mask[:, None, None, :]) * -1e9
            x = self.first(nn.functional.embedding(input_ids, self.words) + self.places[: input_ids.shape[1]])
            for layer in self.layers:
                x = layer(x, bias)
            mean = (x * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
            return nn.functional.normalize(mean)

    return Sentences().eval()


def export(folder: Path, path: Path) -> None:
    """As ONNX: `input_ids` and `attention_mask` int32 `[N, L]`, `sentence` float32 `[N, 384]`, N and L of any size."""
    import torch

    # Two tensors: the exporter would take the same one for a single input.
    examples = tuple(torch.ones((2, 7), dtype=torch.int32) for _ in range(2))
    sizes = {0: torch.export.Dim("rows"), 1: torch.export.Dim("tokens", max=512)}
    partial = path.with_name(".partial.onnx")
    torch.onnx.export(
        build(folder),
        examples,
        str(partial),
        dynamo=True,
        external_data=False,
        input_names=["input_ids", "attention_mask"],
        output_names=["sentence"],
        dynamic_shapes={"input_ids": sizes, "attention_mask": sizes},
        verbose=False,
    )
    partial.replace(path)
