"""What families with mixtures of experts share: names of the experts' tensors, and which layers have them."""

from __future__ import annotations

from torch import Tensor

from onnxlm.models.config import ConfigReader
from onnxlm.models.weight_rules import Cut, Rules, Stack

_GATE_UP, _DOWN = "layers.{i}.mlp.experts.gate_up", "layers.{i}.mlp.experts.down"
# Keys of training, and of what a forward pass may return besides logits.
UNUSED = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")


def alternating(stored: Tensor) -> Tensor:
    """[E, 2 N, K] with the rows of gate in front of those of up -> the same rows, gate and up in turns."""
    experts, rows, width = stored.shape
    return stored.view(experts, 2, rows // 2, width).transpose(1, 2).reshape(stored.shape)


def expert_rules(
    prefix: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> Rules:
    """Rules for experts that lie one by one in a checkpoint, or all in two tensors.

    Args:
        prefix: What stands in front of an expert's number, with "{i}".
        names: What one expert's gate, up and down matrices are called.
    """
    gate, up, down = (f"{prefix}.{{e}}.{name}.weight" for name in names)
    return {
        f"{prefix}.gate_up_proj": Cut((_GATE_UP,), lambda stored, config: (alternating(stored),)),
        f"{prefix}.down_proj": _DOWN,
        gate: Stack(_GATE_UP, 0, 2),
        up: Stack(_GATE_UP, 1, 2),
        down: Stack(_DOWN),
    }


def expert_counts(reader: ConfigReader, key: str, many: int, used: int) -> tuple[int, int]:
    """How many experts there are, and how many of them a token takes.

    Args:
        reader: The config.
        key: The family's for how many there are.
        many: What holds where the config does not say.
        used: The same of `num_experts_per_tok`.

    Raises:
        ConfigError: A token takes more than there are.
    """
    experts, taken = reader.positive(key, many), reader.positive("num_experts_per_tok", used)
    if taken > experts:
        raise reader.fault(
            "num_experts_per_tok", taken, f"at most the number of experts, {experts}"
        )
    return experts, taken


def sparse_layers(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
    """Whether each layer has experts, as Qwen's configs say it."""
    step = reader.positive("decoder_sparse_step", 1)
    dense = reader.items("mlp_only_layers", int) or ()
    return tuple((index + 1) % step == 0 and index not in dense for index in range(layers))
