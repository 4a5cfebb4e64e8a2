"""Weights of a model by what they serve: embedding, attention, feed-forward blocks, norms, head."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

# The first pattern that a tensor's name holds decides: an attention's own norm counts as a norm.
_PATTERNS = (
    ("norms", re.compile(r"norm|(^|\.)ln_")),
    ("head", re.compile(r"(^|\.)(lm_head|embed_out|output)\.")),
    ("positions", re.compile(r"embed_positions|(^|\.)wpe\.")),
    ("embedding", re.compile(r"embed|(^|\.)wte\.")),
    ("attention", re.compile(r"attn|attention")),
    ("mlp", re.compile(r"mlp|ffn|feed_forward|experts|(^|\.)fc[12]\.")),
    ("rotary tables", re.compile(r"^rope_")),
)
_OTHER = "other"
_ORDER = (
    *("embedding", "positions", "attention", "mlp", "norms", "head", "rotary tables"),
    _OTHER,
)


@dataclass(frozen=True)
class Component:
    """One kind of weights.

    Attributes:
        name: "embedding", "positions" (trained ones), "attention", "mlp", "norms", "head", "rotary tables"
            or "other".
        parameters: How many numbers the model has there; None where that is not known.
        bytes: What they take in the source's files.
        biases: How many of the parameters are biases of matrix products; None where that is not known.
        tied_to: The component that serves as this one; it is counted there.
    """

    name: str
    parameters: int | None
    bytes: int
    biases: int | None = None
    tied_to: str | None = None


def components_of(
    sizes: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]], tied: bool
) -> tuple[Component, ...]:
    """Sum tensors by component.

    Args:
        sizes: Bytes by tensor name.
        shapes: Shapes of parameters by name; empty when they are not known.
        tied: The embedding serves as the head.
    """
    size: dict[str, int] = {}
    count: dict[str, int] = {}
    biases: dict[str, int] = {}
    for name, nbytes in sizes.items():
        part = component_of(name)
        size[part] = size.get(part, 0) + nbytes
    for name, shape in shapes.items():
        part = component_of(name)
        count[part] = count.get(part, 0) + math.prod(shape)
        if part != "norms" and name.endswith("bias"):
            biases[part] = biases.get(part, 0) + math.prod(shape)
    return tuple(
        Component(
            name,
            # What a config does not list has no parameters of its own: tables and constants of a graph.
            count.get(name, 0) if shapes else None,
            size.get(name, 0),
            biases.get(name, 0) if shapes else None,
            "embedding" if name == "head" and tied else None,
        )
        for name in _ORDER
        if name in size or name in count or (name == "head" and tied)
    )


def component_of(name: str) -> str:
    """The component that a tensor of this name belongs to."""
    return next((part for part, pattern in _PATTERNS if pattern.search(name)), _OTHER)
