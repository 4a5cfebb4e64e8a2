"""The runtime on SmolLM2-135M in full precision, against the eager model run at once over each whole text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.parity import assert_logits_close
from transformers import AutoTokenizer

from onnxlm.export import export
from onnxlm.models import load as load_eager
from onnxlm.models.layers.decoder import DecoderLM
from onnxlm.runtime import LanguageModel, load
from onnxlm.runtime.engine import PREFILL_CHUNK

pytestmark = [pytest.mark.real_model, pytest.mark.slow]


@pytest.fixture(scope="module")
def model(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    package = export(smollm2, tmp_path_factory.mktemp("smollm2") / "fp32")
    return load(package.path, threads=1)


@pytest.fixture(scope="module")
def eager(smollm2: Path) -> DecoderLM:
    return load_eager(smollm2)


def assert_greedy(eager: DecoderLM, prompt: list[int], answer: list[int]) -> None:
    """Each token is the one that the whole text before it asks for."""
    logits = eager.logits([*prompt, *answer])
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer


def test_a_batch_of_prompts(model: LanguageModel, eager: DecoderLM) -> None:
    prompts = [
        "The capital of France is",
        "Once upon a time",
        "def fibonacci(n):\n    if n < 2:\n        return n\n",
    ]
    results = model.generate(prompts, max_new_tokens=24)
    assert results[0].text.startswith(" Paris.")
    for prompt, result in zip(prompts, results, strict=True):
        assert_greedy(eager, model.encode(prompt), result.token_ids)
        assert result.token_ids == model.generate(prompt, max_new_tokens=24).token_ids


def test_logits_behind_every_position(model: LanguageModel, eager: DecoderLM) -> None:
    ids = model.encode("Paris is the capital of France, and Rome that of Italy. " * 45)
    assert len(ids) > PREFILL_CHUNK
    assert_logits_close(torch.from_numpy(model.logits(ids)), eager.logits(ids))


def test_a_chat(model: LanguageModel, eager: DecoderLM, smollm2: Path) -> None:
    """Its template is the checkpoint's, rendered by transformers."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    chat = model.chat("You answer in one sentence.")
    held = 0
    for text in ("What is the capital of France?", "And of Italy?", "Which is older?"):
        reply = chat.send(text, max_new_tokens=24)
        shown = "".join(reply)
        messages = chat.messages
        assert (messages[-1]["content"], shown) == (reply.result.text, reply.result.text)
        prompt = tokenizer.apply_chat_template(
            messages[:-1], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        assert_greedy(eager, ids, reply.result.token_ids)
        # All that the last turn held, but the end of its answer if that is spelled otherwise now.
        assert len(ids) - held <= reply.result.prompt_tokens <= len(ids) - held + 24
        held = len(ids) + len(reply.result.token_ids) - 1
    assert [m["role"] for m in messages] == ["system"] + ["user", "assistant"] * 3
