"""Fetches a checkpoint from the Hugging Face Hub: safetensors and tokenizer files, never code."""

from __future__ import annotations

import re
from pathlib import Path

from onnxlm.errors import CheckpointError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_WANTED = [
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "*.jinja",
]


def is_hub_id(source: str) -> bool:
    """Whether the text has the form `org/name`."""
    return _HUB_ID.fullmatch(source) is not None


def fetch(hub_id: str) -> Path:
    """The local folder of a Hub repository's newest revision, from the cache when there is no network.

    Raises:
        CheckpointError: The repository does not exist, is not open to the user, or cannot be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        # Patterns match across "/": files in sub-folders are other copies of the weights.
        folder = snapshot_download(hub_id, allow_patterns=_WANTED, ignore_patterns=["*/*"])
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{hub_id}: there is no such path, and the Hub did not give a model of this name",
            found=str(error).strip().splitlines()[0],
            fix="check the name and the network, or fetch the model elsewhere and give its folder",
        ) from error
    return Path(folder)
