"""What families of the LayerNorm era share: GPT-2's spelling of keys, packed projections, plain blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from onnxlm.models.config import ConfigReader, ModelConfig
from onnxlm.models.layers.mlp import MLP
from onnxlm.models.layers.norm import LayerNorm
from onnxlm.models.weight_rules import Cut, Rules

# Usual key -> GPT-2's.
GPT2_KEYS: Mapping[str, str] = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "layer_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}
# Of training, of a head for classification, or copies of other keys.
GPT2_UNUSED = (
    *("attn_pdrop", "embd_pdrop", "resid_pdrop", "n_ctx", "task_specific_params"),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
    *("summary_first_dropout", "gradient_checkpointing", "predict_special_tokens"),
)
# Causal masks and rotary frequencies that old checkpoints hold though they follow from the config.
ATTENTION_BUFFERS = ("bias", "masked_bias", "rotary_emb.inv_freq")


@dataclass(frozen=True, kw_only=True)
class ClassicConfig(ModelConfig):
    """What these families have besides.

    Attributes:
        hidden_act: Name of the activation, see `layers/activation.py`.
        num_key_value_heads: As many as query heads, but for Falcon and Phi.
    """

    intermediate_size: int
    layer_norm_eps: float
    hidden_act: str
    num_key_value_heads: int

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads


def classic_fields(
    reader: ConfigReader, *, act: str, tied: bool, positions: int = 2048, fourfold: bool = True
) -> dict[str, Any]:
    """Fields of `ClassicConfig` but `num_key_value_heads`, after `reader.spelled`.

    Args:
        reader: The config.
        act: `hidden_act` where the config does not say.
        tied: Whether head and embedding are one where the config does not say.
        positions: `max_position_embeddings` where the config does not say.
        fourfold: `intermediate_size` is 4 * hidden_size where the config does not say; it has to, otherwise.
    """
    fields = reader.model_fields(tied, positions)
    reader.divides("num_attention_heads", "hidden_size")
    inner = 4 * fields["hidden_size"] if fourfold else None
    return {
        **fields,
        "intermediate_size": reader.positive("intermediate_size", inner),
        "layer_norm_eps": reader.get("layer_norm_eps", float, 1e-5),
        "hidden_act": reader.activation(default=act),
        "num_key_value_heads": fields["num_attention_heads"],
    }


def layer_norm(config: ClassicConfig) -> LayerNorm:
    """A norm of the residual stream."""
    return LayerNorm(config.hidden_size, config.layer_norm_eps)


def plain_mlp(config: ClassicConfig, bias: bool = True) -> MLP:
    """Two layers with an activation between."""
    return MLP(config.hidden_size, config.intermediate_size, bias, config.hidden_act)


QKV = tuple(f"layers.{{i}}.self_attn.{part}_proj" for part in "qkv")


def packed_by_group(stored: str) -> Rules:
    """Rules for Q, K and V that lie together for each key-value head: its queries, its key, its value.

    Args:
        stored: Name template of the module that holds them.
    """
    return {
        f"{stored}.{part}": Cut(tuple(f"{name}.{part}" for name in QKV), _cut_groups)
        for part in ("weight", "bias")
    }


def _cut_groups(stored: Tensor, config: ClassicConfig) -> Sequence[Tensor]:
    """[Hkv * (G + 2) * D, ...] -> [Hkv * G * D, ...], and [Hkv * D, ...] twice."""
    groups = stored.reshape(config.num_key_value_heads, -1, config.head_dim, *stored.shape[1:])
    parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
    return [part.reshape(-1, *stored.shape[1:]) for part in parts]
