"""What the Gemma generations share: norms stored as their difference to 1, scaled embeddings, GeGLU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onnxlm.models.architectures import _gguf as gguf
from onnxlm.models.architectures._common import ATTENTION, MLP, OUTER
from onnxlm.models.architectures._windows import WindowedConfig
from onnxlm.models.config import ConfigReader
from onnxlm.models.layers.attention import AttentionOptions
from onnxlm.models.layers.cached_attention import AttentionSpec
from onnxlm.models.layers.decoder import Scaling
from onnxlm.models.weight_rules import Rules, raised, under

if TYPE_CHECKING:
    from onnxlm.models.checkpoint.gguf_metadata import FamilyMetadata

GELU = "gelu_pytorch_tanh"


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(WindowedConfig):
    """Numbers of Gemma 2 and 3 besides, by Hugging Face key name.

    Attributes:
        query_pre_attn_scalar: Scores are divided by its root.
        attn_logit_softcapping: Soft-cap of the scores; None for none.
        final_logit_softcapping: Soft-cap of the logits; None for none.
    """

    query_pre_attn_scalar: float
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None


def gemma_fields(reader: ConfigReader, **defaults: Any) -> dict[str, Any]:
    """Fields of `RotaryConfig`; attention has biases by `attention_bias`, the feed-forward block never.

    Args:
        reader: The config.
        defaults: As `ConfigReader.rotary_fields` takes them.
    """
    reader.only("use_bidirectional_attention", None, False)
    reader.unused("cache_implementation")  # how transformers' own generation keeps its cache
    fields = reader.rotary_fields(tied=True, biases=False, head_dim=256, **defaults)
    return fields | {"attention_bias": reader.get("attention_bias", bool, False)}


def gemma_options(config: WindowedConfig, rope: str = "default") -> AttentionOptions:
    """Biases of the attention block, and the tables that it turns by."""
    bias = config.attention_bias
    return AttentionOptions(qkv_bias=bias, out_bias=bias, rope=rope)


def gemma_spec(config: GemmaConfig, window: int) -> AttentionSpec:
    """Attention of Gemma 2 and 3 with a window, 0 for none."""
    return AttentionSpec(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        scale=config.query_pre_attn_scalar**-0.5,
        sliding_window=window,
        softcap=config.attn_logit_softcapping or 0.0,
    )


def gemma_scaling(config: GemmaConfig) -> Scaling:
    """Embeddings times the root of their width, soft-capped logits."""
    return Scaling(embedding=config.hidden_size**0.5, softcap=config.final_logit_softcapping or 0.0)


def gemma_rules(norms: Iterable[str]) -> Rules:
    """Rules for a checkpoint whose layers have these norms."""
    layer = "layers.{i}."
    return {
        **OUTER,
        **under("model.layers.{i}", {**ATTENTION, **MLP}),
        **{f"model.{layer}{name}.weight": raised(f"{layer}{name}.weight") for name in norms},
        "model.norm.weight": raised("norm.weight"),
    }


def gguf_gemma_config(
    own: FamilyMetadata, config: Mapping[str, Any], layers_27b: int
) -> dict[str, Any]:
    """What Gemma 2 and 3 have besides in a GGUF file.

    Args:
        own: The metadata.
        config: The usual keys, read already.
        layers_27b: Layers of the size whose scores are scaled by hidden_size / num_attention_heads. The
            metadata does not say it; llama.cpp knows that size by its layers too.
    """
    by_hidden = config["hidden_size"] // config["num_attention_heads"]
    large = config["num_hidden_layers"] == layers_27b
    return {
        "hidden_activation": GELU,
        "query_pre_attn_scalar": by_hidden if large else config["head_dim"],
        "attention_bias": gguf.attention_biases(own),
    }


# Gemma 2 and 3: in front of both branches and behind them.
SANDWICH = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
