"""Small models whose every weight matters.

A freshly initialised model hides most faults: its biases are 0, its norm weights 1, its attention almost
uniform. The recipe moves every vector away from its default and makes every matrix eight times larger.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from support.plain import find_plain

VECTOR_NOISE = 0.4
MATRIX_GAIN = 8.0
# Falcon's "eager" attention adds ALiBi twice: once to the scores and once more with the mask.
_IMPLEMENTATIONS = {"falcon": "sdpa"}


def _granite(config: Mapping[str, Any]) -> dict[str, float]:
    branch = config["embedding_multiplier"] / config["residual_multiplier"]
    width = config["hidden_size"] // config["num_attention_heads"]
    return {
        ".q_proj.weight": width**-0.5 / config["attention_multiplier"],
        ".o_proj.weight": branch,
        ".down_proj.weight": branch,
        "model.norm.weight": config["logits_scaling"],
    }


# Factors of weights, by the ends of their names, that make up for a family's own constants. Those make logits
# small beside 1, where tolerances are absolute, and hide what is multiplied by them.
_MAKE_UP: Mapping[str, Callable[[Mapping[str, Any]], dict[str, float]]] = {
    # Cooler queries: attention that picks single keys is flipped by what 8 bits round.
    "cohere": lambda config: {
        "model.norm.weight": 1 / config["logit_scale"],
        "q_norm.weight": 0.25,
    },
    "granite": _granite,
    "opt": lambda config: (
        {} if config.get("do_layer_norm_before", True) else {"lm_head.weight": 2.0}
    ),
    "palm": lambda config: {"model.norm.weight": config["hidden_size"] ** 0.5},
}


def hot_model(config: Mapping[str, Any], seed: int = 0) -> PreTrainedModel:
    """A transformers model of a Hugging Face config, by the hot recipe, fp32, evaluation mode.

    A family that transformers does not have is one of `support.plain`.
    """
    torch.manual_seed(seed)
    model = _model(config)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        stored = model.state_dict(keep_vars=True)  # buffers that a checkpoint holds too
        for parameter in {id(tensor): tensor for tensor in stored.values()}.values():
            if parameter.dim() == 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(VECTOR_NOISE * noise)
            else:
                parameter.mul_(MATRIX_GAIN)
        factors = _MAKE_UP.get(config["model_type"], lambda config: {})(config)
        for end, factor in factors.items():
            for name in [name for name in stored if name.endswith(end)]:
                stored[name].mul_(factor)
    return model.eval()


def _model(config: Mapping[str, Any]) -> PreTrainedModel:
    keys = dict(config)
    model_type = keys.pop("model_type")
    plain = find_plain(model_type)
    if plain is not None:
        return cast(PreTrainedModel, plain(config))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **keys),
        attn_implementation=_IMPLEMENTATIONS.get(model_type, "eager"),
        dtype=torch.float32,
    )
    return model


def rounded(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy with its weights rounded to `dtype` and computing in it."""
    return copy.deepcopy(model).to(dtype)


def save_folder(model: PreTrainedModel, folder: Path, shards: int = 1) -> Path:
    """Save as transformers does, in exactly so many weight files."""
    unique = {p.data_ptr(): p.numel() * p.element_size() for p in model.state_dict().values()}
    limit = sum(unique.values())
    while True:
        for old in folder.glob("*.safetensors*"):
            old.unlink()
        model.save_pretrained(folder, max_shard_size=limit + 1)
        written = len(list(folder.glob("*.safetensors")))
        if written == shards:
            return folder
        if written > shards:
            raise ValueError(f"no shard size gives {shards} files")
        limit = limit * 9 // 10


@torch.no_grad()
def oracle_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """float32 [sequence_length, vocab_size] of one row run alone, at once."""
    return model(torch.tensor([ids])).logits[0].float()
