"""The eager model as the reference of a proof: numpy in and out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onnxlm.calls import Floats, Ids
from onnxlm.models.layers.decoder import DecoderLM


class EagerReference:
    """What `onnxlm.calls.Reference` says, from a model in PyTorch."""

    def __init__(self, model: DecoderLM) -> None:
        self._model = model

    def logits(self, ids: Ids) -> Floats:
        """Logits behind every token of a row that runs alone and at once, [n, V]."""
        logits: Floats = self._model.logits(ids).numpy()
        return logits

    def stream(self, ids: Ids, chunk: int) -> Iterator[Floats]:
        """Logits behind every token of a row, piece by piece over one cache, [<= chunk, V]."""
        cache = None
        for start in range(0, len(ids), chunk):
            part = torch.tensor([list(ids[start : start + chunk])])
            # Entered anew for each piece: it must not stay on while the caller has the turn.
            with torch.inference_mode():
                logits, cache = self._model(part, None, cache)
            yield logits[0].float().numpy()

    def hidden(self, ids: Ids) -> Floats:
        """The residual stream before the first layer and behind each, [L + 1, n, H]."""
        streams: list[Tensor] = []

        def before(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
            streams.append(inputs[0])

        def behind(module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            streams.append(output[0])

        layers = list(self._model.layers)
        hooks = [layers[0].register_forward_pre_hook(before)]
        hooks += [layer.register_forward_hook(behind) for layer in layers]
        try:
            self._model.logits(ids)
        finally:
            for hook in hooks:
                hook.remove()
        return np.stack([stream[0].float().numpy() for stream in streams])
