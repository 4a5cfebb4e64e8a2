"""Activation functions by the names that Hugging Face configs use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional

Activation = Callable[[Tensor], Tensor]


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2. Source: So et al., "Primer" (2021), section 4."""
    return torch.square(functional.relu(x))


# GELU: Hendrycks and Gimpel (2016), x times the normal distribution at x; the others are its tanh form.
_GELU_TANH = partial(functional.gelu, approximate="tanh")

ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "gelu": functional.gelu,
        "gelu_fast": _GELU_TANH,
        "gelu_new": _GELU_TANH,
        "gelu_pytorch_tanh": _GELU_TANH,
        "relu": functional.relu,
        "relu2": squared_relu,
        "silu": functional.silu,
        "swish": functional.silu,
    }
)
