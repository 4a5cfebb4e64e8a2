"""Feed-forward blocks."""

from __future__ import annotations

from torch import Tensor, nn


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)).

    Source: Shazeer, "GLU Variants Improve Transformer" (2020), eq. 6 (SwiGLU, without biases there).
    """

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> [..., hidden_size]."""
        gated: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return gated
