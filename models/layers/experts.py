"""Many feed-forward blocks of which each token runs a few: one torch custom op.

Legend of shapes: B rows, S tokens a row, E experts, k experts a token, K hidden size, N inner size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GateSpec:
    """The gated activation silu(alpha * gate) / alpha * (up + shift), both clamped.

    Attributes:
        alpha: Steepness of the sigmoid; 1 is SiLU.
        shift: Added to the linear half.
        limit: The gate is clamped from above, the linear half from both sides; 0 means not at all.
    """

    alpha: float = 1.0
    shift: float = 0.0
    limit: float = 0.0


@dataclass(frozen=True)
class Routing:
    """Which experts each token runs, and how much of each.

    Attributes:
        indices: int64 [B, S, k], all different.
        weights: [B, S, k], 0 or more.
        normalized: A token's weights sum to 1.
        logits: [B, S, E] whose k largest are those of the experts, and whose softmax is the weights: over the
            k where they are normalized, over all E where not. None where the choice is made in another way.
        factor: Of the sum over a token's experts.
    """

    indices: Tensor
    weights: Tensor
    normalized: bool
    logits: Tensor | None = None
    factor: float = 1.0


def gated(rows: Tensor, spec: GateSpec) -> Tensor:
    """[..., 2 N] of alternating gate and linear numbers -> [..., N]."""
    gate, up = rows[..., 0::2], rows[..., 1::2]
    if spec.limit:
        gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
    return gate * torch.sigmoid(spec.alpha * gate) * (up + spec.shift)


@torch.library.custom_op("onnxlm::experts", mutates_args=())
def experts_op(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    logits: Tensor | None,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    normalized: bool,
    alpha: float,
    shift: float,
    limit: float,
) -> Tensor:
    """Opaque node of a traced program; `export/lowerings` replaces it. See `experts`."""
    spec = GateSpec(alpha, shift, limit)
    return _reference(x, indices, weights, (gate_up, down), (gate_up_bias, down_bias), spec)


@experts_op.register_fake
def _shape_only(x: Tensor, *rest: object) -> Tensor:
    return torch.empty_like(x)


def _reference(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    matrices: tuple[Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None],
    spec: GateSpec,
) -> Tensor:
    tokens = x.reshape(-1, x.shape[-1])
    chosen, shares = indices.reshape(len(tokens), -1), weights.reshape(len(tokens), -1)
    mixed = torch.zeros_like(tokens)
    for expert in sorted(set(chosen.flatten().tolist())):
        rows, places = (chosen == expert).nonzero(as_tuple=True)
        up_bias, down_bias = (None if bias is None else bias[expert] for bias in biases)
        inner = gated(torch.nn.functional.linear(tokens[rows], matrices[0][expert], up_bias), spec)
        outer = torch.nn.functional.linear(inner, matrices[1][expert], down_bias)
        mixed = mixed.index_add(0, rows, outer * shares[rows, places, None].to(outer.dtype))
    return mixed.reshape(x.shape)


def experts(
    x: Tensor,
    routing: Routing,
    matrices: tuple[Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None],
    spec: GateSpec,
) -> Tensor:
    """Factor * the sum over a token's experts of weight * expert(x).

    Args:
        x: [B, S, K].
        routing: See `Routing`.
        matrices: Gate and up of every expert, rows alternating, [E, 2 N, K]; down, [E, K, N].
        biases: [E, 2 N] and [E, K], or None.
        spec: The activation.

    Returns:
        [B, S, K].
    """
    if torch.compiler.is_exporting():
        mixed: Tensor = experts_op(
            x,
            routing.indices,
            routing.weights,
            routing.logits,
            matrices[0],
            biases[0],
            matrices[1],
            biases[1],
            routing.normalized,
            spec.alpha,
            spec.shift,
            spec.limit,
        )
    else:
        mixed = _reference(x, routing.indices, routing.weights, matrices, biases, spec)
    return mixed if routing.factor == 1.0 else mixed * routing.factor
