"""Checkpoint -> eager reference model."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from onnxlm.models.checkpoint import Checkpoint, read
from onnxlm.models.checkpoint.matching import outline
from onnxlm.models.layers.decoder import DecoderLM


def load(source: str | Path | Checkpoint, dtype: torch.dtype = torch.float32) -> DecoderLM:
    """Build the eager reference model of a checkpoint and fill it.

    Args:
        source: What `onnxlm.models.checkpoint.read` accepts, or what it returned.
        dtype: Type of the parameters and tables.

    Returns:
        The model in evaluation mode; tied weights are one parameter.
    """
    checkpoint = source if isinstance(source, Checkpoint) else read(source)
    # Each weight is allocated once, by its reader.
    model = outline(checkpoint.architecture, checkpoint.config)
    owners = _owners(model)
    for name, value in checkpoint.state():
        _assign(owners[name], value.to(dtype))
    # Rotary tables too: a graph's attention takes them in the type of its queries.
    return model.to(dtype).eval()


def _owners(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Every place that holds a parameter, by the parameter's first name."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, attribute))
    return {name: places[id(parameter)] for name, parameter in model.named_parameters()}


def _assign(places: list[tuple[nn.Module, str]], value: Tensor) -> None:
    parameter = nn.Parameter(value)
    for module, attribute in places:
        setattr(module, attribute, parameter)
