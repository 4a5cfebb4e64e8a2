"""GPT-3, from its paper.

Source: Brown et al., "Language Models are Few-Shot Learners" (2020), section 2.1: GPT-2's model (learned
positions, norms in front, GELU, head tied to the embedding) at the sizes of Table 2.1. All layers are dense
here: the paper alternates them with locally banded sparse ones (Child et al., 2019) whose pattern it does not
give. Weights were not published; the names of a checkpoint's tensors are this project's.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnxlm.models.architectures._common import ATTENTION, NORMS, OUTER, embedding_and_head
from onnxlm.models.config import ConfigReader, ModelConfig
from onnxlm.models.layers.attention import Attention, AttentionOptions
from onnxlm.models.layers.cached_attention import AttentionSpec
from onnxlm.models.layers.decoder import DecoderLM, Positions
from onnxlm.models.layers.decoder_layers import DecoderLayer
from onnxlm.models.layers.mlp import MLP
from onnxlm.models.layers.norm import LayerNorm
from onnxlm.models.layers.position_embedding import LearnedPositions
from onnxlm.models.registry import Architecture
from onnxlm.models.weight_rules import under


@dataclass(frozen=True, kw_only=True)
class Gpt3Config(ModelConfig):
    """Table 2.1, by the names that Hugging Face gives such numbers.

    Attributes:
        head_dim: d_head; times the heads it need not be d_model (GPT-3 XL: 24 x 128 and 2048).
        intermediate_size: d_ff, four times d_model in the paper.
    """

    intermediate_size: int
    head_dim: int
    layer_norm_eps: float
    hidden_act: str


def _parse_config(reader: ConfigReader) -> Gpt3Config:
    fields = reader.model_fields(tied=True)
    reader.only("tie_word_embeddings", True)
    hidden = fields["hidden_size"]
    config = Gpt3Config(
        **fields,
        intermediate_size=reader.positive("intermediate_size", 4 * hidden),
        head_dim=reader.positive("head_dim", hidden // fields["num_attention_heads"]),
        layer_norm_eps=reader.get("layer_norm_eps", float, 1e-5),
        hidden_act=reader.activation(default="gelu_new"),
    )
    reader.finish()
    return config


def _build(config: Gpt3Config) -> DecoderLM:
    width, heads = config.hidden_size, config.num_attention_heads
    spec = AttentionSpec(heads, heads, config.head_dim**-0.5)
    options = AttentionOptions(qkv_bias=True, out_bias=True, rope=None)

    def norm() -> LayerNorm:
        return LayerNorm(width, config.layer_norm_eps)

    def layer() -> DecoderLayer:
        mlp = MLP(width, config.intermediate_size, True, config.hidden_act)
        attention = Attention(width, config.head_dim, spec, options)
        return DecoderLayer(attention, mlp, norm(), norm())

    embedding, head = embedding_and_head(config)
    return DecoderLM(
        embedding,
        [layer() for _ in range(config.num_hidden_layers)],
        norm(),
        head,
        positions=Positions(learned=LearnedPositions(config.max_position_embeddings, width)),
    )


_MLP = {f"mlp.{name}": f"mlp.{name}" for name in ("up_proj", "down_proj")}

ARCHITECTURE = Architecture(
    parse_config=_parse_config,
    build=_build,
    rules={
        **OUTER,
        "model.embed_positions.weight": "embed_positions.weight",
        "model.norm.bias": "norm.bias",
        **under("model.layers.{i}", {**ATTENTION, **_MLP, **NORMS}),
    },
    tiny={
        "model_type": "gpt3",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu_new",
        "tie_word_embeddings": True,
    },
)
