"""Every family that reads GGUF files: the model of transformers that was written, and its own reading."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf.constants import MODEL_ARCH_NAMES
from support.gguf_families import CONVENTIONS
from support.gguf_writer import write_gguf
from support.hot import hot_model, oracle_logits
from support.parity import assert_logits_close
from transformers import AutoConfig, AutoModelForCausalLM

from onnxlm.models import load
from onnxlm.models.checkpoint import read
from onnxlm.models.registry import architecture_names, find_architecture

FAMILIES = [name for name in architecture_names() if find_architecture(name).gguf is not None]
CASES = {
    f"{name}: {case}": {**find_architecture(name).tiny, **change}
    for name in FAMILIES
    for case, change in CONVENTIONS[name].cases.items()
}
# Those that transformers 5.24 reads from GGUF, but for what it reads wrongly.
READ_BY_TRANSFORMERS = (
    *(
        "bloom",
        "falcon",
        "gemma2",
        "gemma3_text",
        "gpt2",
        "llama",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
    ),
    "stablelm",
)
MISREAD = (
    *(
        "falcon: groups, two norms",
        "falcon: groups, one norm",
    ),  # rows of Q, K and V stay as they lie
    "stablelm: head norms",  # does not know them
)
# Longer than every window and than every original context of scaled positions.
IDS = [(7 * position + 3) % 90 for position in range(40)]


@pytest.mark.parametrize("name", FAMILIES)
def test_files_are_called_what_the_gguf_package_calls_them(name: str) -> None:
    family = find_architecture(name).gguf
    assert family is not None
    assert family.architecture == MODEL_ARCH_NAMES[CONVENTIONS[name].arch]


@pytest.mark.parametrize("case", CASES)
def test_logits_of_the_model_that_was_written(case: str, tmp_path: Path) -> None:
    oracle = hot_model(CASES[case])
    model = load(write_gguf(tmp_path / "a.gguf", oracle))
    assert_logits_close(model.logits(IDS), oracle_logits(oracle, IDS))


@pytest.mark.parametrize(
    "case",
    [
        case
        for case, config in CASES.items()
        if config["model_type"] in READ_BY_TRANSFORMERS and case not in MISREAD
    ],
)
def test_logits_of_the_file_as_transformers_reads_it(case: str, tmp_path: Path) -> None:
    """Its config is the model's own: transformers leaves out most of what the metadata says."""
    oracle = hot_model(CASES[case])
    path = write_gguf(tmp_path / "a.gguf", oracle)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file=path.name,
        config=oracle.config,
        dtype=torch.float32,
        attn_implementation="eager",
    )
    assert_logits_close(load(path).logits(IDS), oracle_logits(theirs.eval(), IDS))


@pytest.mark.parametrize("case", CASES)
def test_transformers_understands_the_config(case: str, tmp_path: Path) -> None:
    """A package's config.json is what was read of the file: other tools get the same model from it."""
    oracle = hot_model(CASES[case])
    raw = dict(read(write_gguf(tmp_path / "a.gguf", oracle)).raw_config)
    again = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(raw.pop("model_type"), **{"pad_token_id": None, **raw}),
        attn_implementation=oracle.config._attn_implementation,
        dtype=torch.float32,
    )
    again.load_state_dict(oracle.state_dict())
    assert_logits_close(oracle_logits(again.eval(), IDS), oracle_logits(oracle, IDS))
