"""How the generations of DeepSeek lie in GGUF files: they share one `general.architecture`.

Files since spring 2025 have the maps of keys and values apart, `attn_k_b` (turned) and `attn_v_b`, and under
the usual keys the widths of an absorbed head; older ones have `attn_kv_b` as checkpoints have it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gguf.constants import MODEL_ARCH, MODEL_TENSOR, ExpertGatingFuncType, Keys
from torch import Tensor

from onnxlm.models.architectures import _gguf as gguf
from onnxlm.models.architectures._deepseek import K_UP, V_UP, DeepseekConfig, cut_kv
from onnxlm.models.registry import GgufFamily
from onnxlm.models.weight_rules import Cut, Rules

if TYPE_CHECKING:
    from onnxlm.models.checkpoint.gguf_metadata import FamilyMetadata

_ATTENTION = {
    MODEL_TENSOR.ATTN_Q: "self_attn.q_proj",
    MODEL_TENSOR.ATTN_Q_A: "self_attn.q_a_proj",
    MODEL_TENSOR.ATTN_Q_A_NORM: "self_attn.q_a_layernorm",
    MODEL_TENSOR.ATTN_Q_B: "self_attn.q_b_proj",
    MODEL_TENSOR.ATTN_KV_A_MQA: "self_attn.kv_a_proj",
    MODEL_TENSOR.ATTN_KV_A_NORM: "self_attn.kv_a_layernorm",
    MODEL_TENSOR.ATTN_OUT: "self_attn.o_proj",
}


def _turned_keys(stored: Tensor, config: DeepseekConfig) -> Sequence[Tensor]:
    """[H, C, N] -> what each head does to its query, [H, N, C]."""
    heads = stored.reshape(config.num_attention_heads, config.kv_lora_rank, -1)
    return (heads.transpose(1, 2),)


def _turned_values(stored: Tensor, config: DeepseekConfig) -> Sequence[Tensor]:
    """[H, V, C] -> what each head makes of a latent, [H, C, V]."""
    heads = stored.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
    return (heads.transpose(1, 2),)


_CHOICE_BIAS = gguf.stored_name(MODEL_TENSOR.FFN_EXP_PROBS_B, "bias")
_RULES: Rules = {
    **gguf.named({**gguf.OUTER, **_ATTENTION, **gguf.MLP, **gguf.NORMS, **gguf.SHARED_EXPERT}),
    gguf.stored_name(MODEL_TENSOR.ATTN_KV_B): Cut((K_UP, V_UP), cut_kv),
    gguf.stored_name(MODEL_TENSOR.ATTN_K_B): Cut((K_UP,), _turned_keys),
    gguf.stored_name(MODEL_TENSOR.ATTN_V_B): Cut((V_UP,), _turned_values),
    _CHOICE_BIAS: "layers.{i}.mlp.router.correction_bias",
    **gguf.expert_rules(),
}


def gguf_family(
    model_type: str,
    causal_lm: str,
    sigmoid: bool,
    routing: Callable[[FamilyMetadata], dict[str, Any]],
) -> GgufFamily:
    """One generation's files.

    Args:
        model_type: Hugging Face's name of the generation.
        causal_lm: Hugging Face's class of its language models.
        sigmoid: Whether its routers make scores of logits so, or by softmax.
        routing: What its config says of the choice of experts, beside what all generations have.
    """
    scores = ExpertGatingFuncType.SIGMOID if sigmoid else ExpertGatingFuncType.SOFTMAX

    def config(own: FamilyMetadata) -> dict[str, Any]:
        own.only(Keys.LLM.EXPERT_GATING_FUNC, int(scores))
        return {
            **gguf.base_config(own, model_type, causal_lm),
            **_latent(own),
            **_rope(own),
            **_experts(own),
            **routing(own),
        }

    return GgufFamily(
        architecture=gguf.arch_name(MODEL_ARCH.DEEPSEEK2),
        config=config,
        rules=_RULES,
        applies=lambda own: sigmoid == _has_sigmoid(own),
    )


def _has_sigmoid(own: FamilyMetadata) -> bool:
    """Whether routers make scores by a sigmoid.

    Where a file does not say it, a bias on the choice does: only routers with a sigmoid have one. The configs
    of DeepSeek-V3 that transformers writes lack the key that the converter looks for.
    """
    said = own.get(Keys.LLM.EXPERT_GATING_FUNC)
    if said is not None:
        return bool(said == ExpertGatingFuncType.SIGMOID)
    first = own.get(Keys.LLM.LEADING_DENSE_BLOCK_COUNT, 0)
    return own.has(_CHOICE_BIAS.replace("{i}", str(first)))


def groups(own: FamilyMetadata) -> tuple[int, int]:
    """Groups of experts, and those that a token may use; one where a file knows of none."""
    return (
        own.get(Keys.LLM.EXPERT_GROUP_COUNT, 0) or 1,
        own.get(Keys.LLM.EXPERT_GROUP_USED_COUNT, 0) or 1,
    )


def _latent(own: FamilyMetadata) -> dict[str, Any]:
    """Widths of the attention."""
    heads, turning = own[Keys.Attention.HEAD_COUNT], own[Keys.Rope.DIMENSION_COUNT]
    rank, narrow = own[Keys.Attention.KV_LORA_RANK], own.get(Keys.Attention.Q_LORA_RANK, 0)
    query = own.get(Keys.Attention.KEY_LENGTH_MLA)
    if query is None:
        query, value = own[Keys.Attention.KEY_LENGTH], own[Keys.Attention.VALUE_LENGTH]
        own.only(Keys.Attention.HEAD_COUNT_KV, heads)
    else:
        value = own[Keys.Attention.VALUE_LENGTH_MLA]
        own.only(Keys.Attention.KEY_LENGTH, rank + turning)
        own.only(Keys.Attention.VALUE_LENGTH, rank)
        own.only(Keys.Attention.HEAD_COUNT_KV, 1)
    return {
        "num_key_value_heads": heads,
        "rms_norm_eps": own[Keys.Attention.LAYERNORM_RMS_EPS],
        # Some files of models without it name a width all the same.
        "q_lora_rank": narrow if gguf.in_first_layer(own, MODEL_TENSOR.ATTN_Q_A) else None,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": turning,
        "qk_nope_head_dim": query - turning,
        "v_head_dim": value,
        "attention_bias": False,
    }


def _rope(own: FamilyMetadata) -> dict[str, Any]:
    settings = gguf.rope(own)
    scaling = settings.get("rope_scaling", {})
    if scaling.get("rope_type") == "yarn":
        # A tenth of `mscale_all_dim`. llama.cpp has it for `mscale` too: cosines and sines stay as they are.
        tenth = own.get(Keys.Rope.SCALING_YARN_LOG_MUL)
        if tenth:
            everywhere = round(10 * tenth, 6)  # more digits than these a float32 does not hold
            scaling |= {"mscale": everywhere, "mscale_all_dim": everywhere}
    return settings


def _experts(own: FamilyMetadata) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "first_k_dense_replace": own.get(Keys.LLM.LEADING_DENSE_BLOCK_COUNT, 0),
        "moe_intermediate_size": own[Keys.LLM.EXPERT_FEED_FORWARD_LENGTH],
        "n_shared_experts": own[Keys.LLM.EXPERT_SHARED_COUNT],
        "n_routed_experts": own[Keys.LLM.EXPERT_COUNT],
        "num_experts_per_tok": own[Keys.LLM.EXPERT_USED_COUNT],
        "norm_topk_prob": own.get(Keys.LLM.EXPERT_WEIGHTS_NORM, False),
        "routed_scaling_factor": own.get(Keys.LLM.EXPERT_WEIGHTS_SCALE, 0.0) or 1.0,
    }
