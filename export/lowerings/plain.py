"""Custom ops as the PyTorch that defines them, in operators of opset 21: for engines without opset 23's.

OpenVINO's 1.24 wheel, for one, has neither Attention nor RotaryEmbedding nor RMSNormalization.
"""

from __future__ import annotations

import torch

from onnxlm.export.lowerings import Lowering
from onnxlm.export.lowerings.portable import LOWERING as PORTABLE
from onnxlm.models.layers.cached_attention import cached_attention_op
from onnxlm.models.layers.latent_attention import latent_attention_op
from onnxlm.models.layers.rotate import rotary_op

LOWERING = Lowering(
    # The latest in which the exporter spells RMSNormalization out.
    opset=21,
    state_update="append",
    decompositions={
        **PORTABLE.decompositions,
        # What was registered, without the dispatch that would record it as one node again.
        torch.ops.onnxlm.cached_attention.default: cached_attention_op._init_fn,
        torch.ops.onnxlm.latent_attention.default: latent_attention_op._init_fn,
        torch.ops.onnxlm.rotary.default: rotary_op._init_fn,
    },
    passes=("clip_as_max", "matmul_layout"),
)
