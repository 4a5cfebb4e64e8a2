"""Kimi K2: DeepSeek-V3's architecture with other numbers, under a name of its own.

Source: Kimi Team, "Kimi K2: Open Agentic Intelligence" (2025), section 2.3.
"""

from __future__ import annotations

import dataclasses

from onnxlm.models.architectures import deepseek_v3

_BASE = deepseek_v3.ARCHITECTURE

ARCHITECTURE = dataclasses.replace(
    _BASE,
    tiny={
        **_BASE.tiny,
        "model_type": "kimi_k2",
        # One group, which all experts are in, and one dense layer, as published.
        "n_group": 1,
        "topk_group": 1,
        "num_hidden_layers": 2,
    },
    variants={},
    gguf=None,  # its files say what DeepSeek-V3's say, and are read as such
)
