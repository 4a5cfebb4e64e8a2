"""SmolLM2-135M-Instruct from its GGUF file: values, logits and text against independent readers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH, GGUFReader, get_tensor_name_map, quants
from support.gguf_forms import interleave
from support.hot import oracle_logits
from support.parity import assert_logits_close
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from onnxlm.models import load
from onnxlm.models.checkpoint import Checkpoint, read
from onnxlm.models.layers.decoder import DecoderLM

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def checkpoint(smollm2: Path) -> Checkpoint:
    return read(smollm2)


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> DecoderLM:
    return load(checkpoint)


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    return Tokenizer.from_str(checkpoint.tokenizer_files["tokenizer.json"].decode())


@pytest.fixture(scope="module")
def theirs(smollm2: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)


def test_config_and_provenance(checkpoint: Checkpoint, smollm2: Path) -> None:
    config = checkpoint.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.rope.rope_theta, config.rms_norm_eps) == (100000.0, 1e-5)
    assert config.tie_word_embeddings
    assert checkpoint.generation_config == {
        "bos_token_id": 1,
        "eos_token_id": [2, 0],  # <|im_end|>, which the file names, and <|endoftext|>
        "pad_token_id": 2,
    }
    assert checkpoint.provenance["files"] == {smollm2.name: smollm2.stat().st_size}
    assert checkpoint.provenance["general.license"] == "apache-2.0"


def test_values_are_those_of_the_gguf_package(checkpoint: Checkpoint, smollm2: Path) -> None:
    """Their rows of Q and K lie interleaved, with 9 and 3 heads, so ours are put in that order."""
    reference = {tensor.name: tensor for tensor in GGUFReader(smollm2).tensors}
    theirs = get_tensor_name_map(MODEL_ARCH.LLAMA, 30)
    assert len(checkpoint.quantized) == 1 + 7 * 30
    seen = 0
    for name, value in checkpoint.state():
        ours = value.numpy()
        if ".q_proj." in name or ".k_proj." in name:
            ours = interleave(ours, 9 if ".q_proj." in name else 3)
        tensor = reference[theirs.get_name(f"model.{name}", (".weight",)) or ""]
        expected = quants.dequantize(tensor.data, tensor.tensor_type).reshape(ours.shape)
        # d * q + m and d * (q - 8) + (m + 8 d) round alike but where the exponents lie far apart.
        np.testing.assert_array_max_ulp(ours, expected, maxulp=1)
        assert (ours != expected).mean() <= 1e-5
        seen += 1
    assert seen == len(reference) == 272


@pytest.mark.slow
def test_logits_of_every_position(model: DecoderLM, smollm2: Path, tokenizer: Tokenizer) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(
        smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32
    ).eval()
    ids = tokenizer.encode(
        "<|im_start|>user\nWhat is 12 times 12, and why?<|im_end|>\n<|im_start|>assistant\n"
    ).ids
    assert_logits_close(model.logits(ids), oracle_logits(oracle, ids))


def test_greedy_continuation(model: DecoderLM, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The capital of France is").ids
    prompt = len(ids)
    for _ in range(4):
        ids.append(int(model.logits(ids)[-1].argmax()))
    assert tokenizer.decode(ids[prompt:]).startswith(" Paris.")


TEXTS = [
    "Hello, world! It's 12345 o'clock.",
    "東京の天気 🤗 👨‍👩‍👧",
    "  two  spaces\n\nand\tlines\r\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "def f(x):\n    return x ** 2\n",
]


def test_text_survives(tokenizer: Tokenizer) -> None:
    for text in [*TEXTS, "a  5\n\n7", " 12 a"]:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_vocabulary_and_markers(
    checkpoint: Checkpoint, tokenizer: Tokenizer, theirs: PreTrainedTokenizerFast
) -> None:
    assert tokenizer.get_vocab() == theirs.get_vocab()
    assert tokenizer.get_vocab_size() == checkpoint.config.vocab_size == 49152
    assert theirs.chat_template == checkpoint.tokenizer_files["chat_template.jinja"].decode()
    for marker, token in (("<|im_start|>", 1), ("<|im_end|>", 2), ("<|endoftext|>", 0)):
        assert tokenizer.encode(f"x{marker}y").ids[1:-1] == [token]
        assert tokenizer.decode([token]) == ""


def test_ids_equal_transformers_where_no_digit_follows_a_run_of_spaces(
    tokenizer: Tokenizer, theirs: PreTrainedTokenizerFast
) -> None:
    for text in TEXTS:
        assert tokenizer.encode(text).ids == theirs(text).input_ids


def test_digits_are_split_before_spaces(tokenizer: Tokenizer) -> None:
    """Pre-tokenizer "smollm": digits are cut out first, so a run of spaces before one stays whole.

    transformers 5.24 drops that step of the file and cuts the run before its last space.
    """
    assert tokenizer.encode("a  5").tokens == ["a", "\u0120\u0120", "5"]
    assert tokenizer.encode("12").tokens == ["1", "2"]
