"""A tiny hot Llama on disk, with a tokenizer and a chat template: what a user's checkpoint folder holds."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from onnxlm.models.architectures.llama import ARCHITECTURE
from support.hot import hot_model, save_folder

VOCABULARY = 272
CONTEXT = 64
TEXT = "The capital of France is Paris, and the capital of Japan is Tokyo. " * 4
TEMPLATE = (
    "{% for message in messages %}<user>{{ message.content }}</user>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CONFIG = {
    **ARCHITECTURE.tiny,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "eos_token_id": 0,
}


def train_tokenizer() -> Tokenizer:
    """A byte-level BPE that knows every byte and some words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def write_source(folder: Path, shards: int = 1) -> Path:
    """The model as transformers saves it, in so many weight files."""
    save_folder(hot_model(CONFIG), folder, shards)
    train_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
