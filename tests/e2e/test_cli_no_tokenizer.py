"""A model without tokenizer.json through every command: by token ids, or with one line that says why not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.commands import Ran
from transformers import AutoModelForCausalLM

Cli = Callable[..., Ran]
IDS = [5, 17, 4, 9]


@pytest.fixture(scope="module")
def source(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(tiny_source, tmp_path_factory.mktemp("bare") / "source"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    return folder


@pytest.fixture(scope="module")
def continuation(source: Path) -> list[int]:
    """Greedy ids of transformers behind `IDS`."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    ids = torch.tensor([IDS])
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False
    )
    new: list[int] = made[0, len(IDS) :].tolist()
    return new


def test_export_generate_verify_quantize_bench(
    cli: Cli, source: Path, continuation: list[int], tmp_path: Path
) -> None:
    package, small = tmp_path / "package", tmp_path / "int8"
    assert cli("export", source, package).code == 0
    prompt = ",".join(map(str, IDS))
    ran = cli("generate", package, "--ids", prompt, "--max-new-tokens", "6", "--logprobs", "1")
    assert (ran.code, ran.out) == (0, ",".join(map(str, continuation)) + "\n")
    assert ran.err.startswith(f"{continuation[0]} -")  # the id, then its log-probability
    ran = cli("generate", package, "--ids", prompt, "--max-new-tokens", "6", "--json")
    facts = json.loads(ran.out)
    assert (facts["token_ids"], facts["text"]) == (continuation, None)

    ran = cli("verify", package, "--reference", source)
    assert ran.code == 0, ran.err
    assert "random token ids" in ran.out

    ran = cli("quantize", package, small)
    assert ran.code == 0
    assert ran.err.count("\n") == 1
    assert "has no tokenizer.json, so random token ids are what it is calibrated on" in ran.err
    quality = json.loads((small / "onnxlm.json").read_text(encoding="utf-8"))["quality"]
    assert 0 < quality["prefill_kl"] < 0.01
    assert cli("bench", small, "--prompt-tokens", "8", "--new-tokens", "4").code == 0
    assert cli("eval", small, "--tokens", "64").code == 0


@pytest.fixture(scope="module")
def package(tiny_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny package without its tokenizer."""
    folder = Path(shutil.copytree(tiny_package, tmp_path_factory.mktemp("bare") / "package"))
    file = folder / "onnxlm.json"
    manifest = json.loads(file.read_text(encoding="utf-8"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
        del manifest["files"][name]
    file.write_text(json.dumps(manifest), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("generate", "The capital"),
            "has no tokenizer.json: its tokens have no text; give token ids",
        ),
        (("generate", "--ids", "1,2", "--stop-strings", "x"), "stop_strings: the package has no"),
        (
            ("chat", "--system", "x"),
            "has no tokenizer.json: its tokens have no text; give token ids",
        ),
        (("generate",), "the prompt; allowed: a text, or --ids"),
        (("generate", "x", "--ids", "1"), "the prompt; allowed: a text, or --ids"),
        (("generate", "--chat", "--ids", "1"), "the prompt; allowed: a text with --chat"),
        (("generate", "--ids", "1,x"), "option --ids; found 1,x; allowed: token ids with commas"),
        (("generate", "--ids", "-1"), "token id at position 0 is outside the vocabulary"),
        (("generate", "--ids", ""), "the prompt is empty"),
    ],
)
def test_one_line_says_what_is_wrong(
    cli: Cli, package: Path, arguments: tuple[str, ...], said: str
) -> None:
    command, *rest = arguments
    ran = cli(command, package, *rest)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert ran.err.count("\n") == 1
