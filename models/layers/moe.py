"""Mixtures of experts: a router that chooses, and the experts that run.

Legend of shapes: B rows, S tokens a row, E experts, k experts a token, K hidden size, N inner size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onnxlm.models.layers.cached_attention import split_heads
from onnxlm.models.layers.experts import GateSpec, Routing, experts


class SoftmaxRouter(nn.Module):
    """The k experts of the largest logits, weighted by their softmax.

    Source: Shazeer et al., "Outrageously Large Neural Networks" (2017), eq. 3 without noise; Jiang et al.,
    "Mixtral of Experts" (2024), section 2.1.

    Args:
        hidden_size: K.
        num_experts: E.
        top_k: k.
        normalize: Weights of the chosen sum to 1; otherwise they are shares of the softmax over all experts.
        bias: The logits have biases.
        factor: Of the weights.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        normalize: bool,
        bias: bool = False,
        factor: float = 1.0,
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, num_experts, bias=bias)
        self.top_k = top_k
        self.normalize = normalize
        self.factor = factor

    def forward(self, x: Tensor) -> Routing:
        """Routing of [B, S, K]."""
        logits = self.gate(x)
        weights, chosen = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(self.top_k)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routing(chosen, weights, self.normalize, logits, self.factor)


@dataclass(frozen=True)
class GroupSpec:
    """How a `GroupRouter` chooses.

    Attributes:
        groups: Groups, of neighbouring experts.
        chosen_groups: Groups that a token may use.
        scores: "sigmoid" or "softmax".
        group_top: Experts whose scores make a group's.
        bias: There is a bias on the choice.
        normalize: Weights of the chosen sum to 1 before the factor.
        factor: Of the weights.
    """

    groups: int
    chosen_groups: int
    scores: str
    group_top: int
    bias: bool
    normalize: bool
    factor: float


class GroupRouter(nn.Module):
    """Experts in groups: the best groups are chosen first, then the k best experts inside them.

    A group is as good as the sum of its best scores. The bias steers the choice alone; weights
    are the scores without it.

    Source: DeepSeek-AI, "DeepSeek-V3" (2024), section 2.1.2 (sigmoid scores, bias); "DeepSeek-V2" (2024),
    section 2.2.2 (softmax scores, groups by their best expert).

    Args:
        hidden_size: K.
        num_experts: E, a multiple of the groups.
        top_k: k.
        spec: How the choice is made.
    """

    def __init__(self, hidden_size: int, num_experts: int, top_k: int, spec: GroupSpec) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.correction_bias = nn.Parameter(torch.zeros(num_experts)) if spec.bias else None
        self.top_k = top_k
        self.spec = spec

    def forward(self, x: Tensor) -> Routing:
        """Routing of [B, S, K]."""
        logits = self.gate(x).float()
        scores = logits.sigmoid() if self.spec.scores == "sigmoid" else logits.softmax(dim=-1)
        wanted = scores if self.correction_bias is None else scores + self.correction_bias
        _, chosen = self._within_groups(wanted).topk(self.top_k, dim=-1)
        weights = scores.gather(-1, chosen)
        if self.spec.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(chosen, weights, self.spec.normalize, factor=self.spec.factor)

    def _within_groups(self, wanted: Tensor) -> Tensor:
        """Scores [..., E], those outside of the best groups out of reach."""
        spec = self.spec
        if spec.chosen_groups == spec.groups:
            return wanted
        grouped = split_heads(wanted, spec.groups)
        best = grouped.topk(spec.group_top, dim=-1)[0].sum(-1)
        _, groups = best.topk(spec.chosen_groups, dim=-1)
        allowed = torch.zeros_like(best).scatter(-1, groups, 1.0)
        # Below any score, a bias included, and still a number.
        return grouped.masked_fill(allowed.unsqueeze(-1) == 0, -1e30).flatten(-2)


class Experts(nn.Module):
    """E gated feed-forward blocks in two tensors.

    Attributes:
        gate_up: [E, 2 N, K]; an expert's rows alternate between gate and up.
        down: [E, K, N].
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        spec: GateSpec = GateSpec(),  # noqa: B008  frozen
        bias: bool = False,
    ) -> None:
        super().__init__()
        wide, narrow = 2 * intermediate_size, intermediate_size
        self.gate_up = _matrices(num_experts, wide, hidden_size)
        self.down = _matrices(num_experts, hidden_size, narrow)
        self.gate_up_bias = nn.Parameter(torch.zeros(num_experts, wide)) if bias else None
        self.down_bias = nn.Parameter(torch.zeros(num_experts, hidden_size)) if bias else None
        self.spec = spec

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """[B, S, K] -> [B, S, K]."""
        matrices, biases = (self.gate_up, self.down), (self.gate_up_bias, self.down_bias)
        return experts(x, routing, matrices, biases, self.spec)


def _matrices(count: int, rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(count, rows, columns).normal_(std=columns**-0.5))


class SparseMLP(nn.Module):
    """Routed experts, and where there is one a shared block that every token runs.

    Source: Dai et al., "DeepSeekMoE" (2024), section 3.2; Qwen2-MoE (2024) for the shared block's own gate.

    Args:
        router: Chooses.
        routed: Runs the chosen.
        shared: A feed-forward block, or None.
        shared_gate: Linear to one logit, whose sigmoid the shared block is multiplied by; None for 1.
    """

    def __init__(
        self,
        router: nn.Module,
        routed: Experts,
        shared: nn.Module | None = None,
        shared_gate: nn.Linear | None = None,
    ) -> None:
        super().__init__()
        self.router = router
        self.experts = routed
        self.shared_expert = shared
        self.shared_expert_gate = shared_gate

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, K] -> [B, S, K]."""
        mixed: Tensor = self.experts(x, self.router(x))
        if self.shared_expert is None:
            return mixed
        shared: Tensor = self.shared_expert(x)
        if self.shared_expert_gate is not None:
            shared = shared * torch.sigmoid(self.shared_expert_gate(x))
        return mixed + shared
