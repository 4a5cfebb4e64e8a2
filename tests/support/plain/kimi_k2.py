"""Kimi K2: transformers' DeepSeek-V3 under the name that its checkpoints have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM


class KimiK2Config(DeepseekV3Config):
    """The same keys; what is saved says "kimi_k2"."""

    model_type = "kimi_k2"


def kimi_k2(config: Mapping[str, Any]) -> DeepseekV3ForCausalLM:
    """The model of a Hugging Face config, fp32."""
    keys = {key: value for key, value in config.items() if key != "model_type"}
    return DeepseekV3ForCausalLM._from_config(
        KimiK2Config(**keys), attn_implementation="eager", dtype=torch.float32
    )


MODEL = kimi_k2
