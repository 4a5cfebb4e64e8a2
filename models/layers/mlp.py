"""Feed-forward blocks."""

from __future__ import annotations

from torch import Tensor, nn

from onnxlm.models.layers.activation import ACTIVATIONS


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)): SwiGLU for silu, GeGLU for gelu.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020), eq. 6 (without biases there).
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        activation: str = "silu",
    ) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> [..., hidden_size]."""
        gated: Tensor = self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return gated


class MLP(nn.Module):
    """down(act(up(x))).

    Source: Vaswani et al., "Attention Is All You Need" (2017), eq. 2.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool, activation: str
    ) -> None:
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> [..., hidden_size]."""
        mixed: Tensor = self.down_proj(self.activation(self.up_proj(x)))
        return mixed
