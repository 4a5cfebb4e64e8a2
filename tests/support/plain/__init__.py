"""Models that transformers does not have, as formulas written from their papers: oracles of these families.

`plain/<model_type>.py` exposes `MODEL`, a subclass of `PlainModel`; `hot_model` finds it by that name. None
of the project's code takes part: weights are a dict, sums are in float64, there is no cache.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


class PlainModel:
    """As much of a transformers model as tests use.

    Args:
        config: The family's config.json.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = dict(config)
        self.weights = {
            name: torch.randn(shape) * 0.02 if len(shape) > 1 else torch.zeros(shape)
            for name, shape in self.shapes().items()
        }
        for name, value in self.weights.items():
            if "norm" in name and name.endswith("weight"):
                value.fill_(1.0)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of a checkpoint."""
        raise NotImplementedError

    def logits(self, ids: Tensor) -> Tensor:
        """Token ids int64 [S] -> logits float64 [S, V]."""
        raise NotImplementedError

    def weight(self, name: str) -> Tensor:
        """A tensor in float64."""
        return self.weights[name].double()

    def __call__(self, ids: Tensor) -> SimpleNamespace:
        """Ids [B, S] of rows without padding -> an object with float32 `logits` [B, S, V]."""
        return SimpleNamespace(logits=torch.stack([self.logits(row) for row in ids]).float())

    def state_dict(self, keep_vars: bool = False) -> dict[str, Tensor]:
        return self.weights

    def eval(self) -> PlainModel:
        return self

    def save_pretrained(self, folder: Path, max_shard_size: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.weights, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")


def find_plain(model_type: str) -> type[PlainModel] | None:
    """The model of that file name; None where transformers has the family."""
    name = f"{__name__}.{model_type}"
    if importlib.util.find_spec(name) is None:
        return None
    model: type[PlainModel] = importlib.import_module(name).MODEL
    return model


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Ba et al. (2016), eq. 4."""
    centred = x - x.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    return normed if bias is None else normed + bias


def causal_softmax(scores: Tensor) -> Tensor:
    """Row i of [S, S] over its columns 0..i."""
    ahead = torch.ones_like(scores).triu(1).bool()
    raised = scores.masked_fill(ahead, float("-inf"))
    shares = (raised - raised.max(-1, keepdim=True).values).exp()
    return shares / shares.sum(-1, keepdim=True)
