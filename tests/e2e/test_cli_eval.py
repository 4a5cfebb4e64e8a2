"""`onnxlm eval`: figures against transformers and torch by hand, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.commands import Ran, run_process
from support.hot import hot_model, save_folder
from support.tiny import CONFIG, CONTEXT
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div
from transformers import AutoModelForCausalLM, PreTrainedModel

from onnxlm.evaluation import GREEDY_TOKENS, PROMPT_TOKENS, PROMPTS
from onnxlm.package import open_package

Cli = Callable[..., Ran]
TEXT = "The capital of France is Paris, and Rome was not built in a day. Köln? " * 3


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def int4(tiny_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from onnxlm.quantize import quantize

    return quantize(tiny_package, tmp_path_factory.mktemp("int4") / "model", scheme="int4").path


@pytest.fixture(scope="module")
def oracle(tiny_source: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_source, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def ids(tiny_source: Path) -> list[int]:
    encoded = Tokenizer.from_file(str(tiny_source / "tokenizer.json")).encode(TEXT)
    return list(encoded.ids)


def logits_of(model: PreTrainedModel, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].double()


def positions(count: int, window: int, stride: int) -> list[tuple[int, int]]:
    """(first token that a prediction may look at, token predicted), as the documents say."""
    found = []
    for target in range(1, count):
        start = 0
        while target > start + window:
            start += stride
        found.append((start, target))
    return found


def predictions(model: PreTrainedModel, ids: list[int], window: int, stride: int) -> Tensor:
    """Logits that predict tokens 1 and on, [len(ids) - 1, V], each from its own run of the model."""
    rows = [logits_of(model, ids[a:b])[-1] for a, b in positions(len(ids), window, stride)]
    return torch.stack(rows)


def said(ran: Ran, code: int = 0) -> dict[str, Any]:
    assert (ran.code, ran.err) == (code, "")
    return dict(json.loads(ran.out))


@pytest.mark.parametrize(("window", "stride"), [(CONTEXT, CONTEXT // 2), (20, 20), (32, 5)])
def test_perplexity_by_strided_windows(
    cli: Cli,
    tiny_package: Path,
    text_file: Path,
    oracle: PreTrainedModel,
    ids: list[int],
    window: int,
    stride: int,
) -> None:
    options = ("--window", str(window), "--stride", str(stride), "--threads", "1", "--json")
    found = said(cli("eval", tiny_package, "--text", text_file, *options))
    logits = predictions(oracle, ids, window, stride)
    loss = cross_entropy(logits, torch.tensor(ids[1:])).item()
    assert len(ids) > 2 * CONTEXT
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    assert found["tokens"] == len(ids) - 1
    assert (found["window"], found["stride"], found["comparison"]) == (window, stride, None)
    assert (found["text"], found["provider"]) == ("given text", "cpu")


def test_the_default_is_the_context_by_halves(
    cli: Cli, tiny_package: Path, text_file: Path
) -> None:
    found = said(cli("eval", tiny_package, "--text", text_file, "--tokens", "100", "--json"))
    assert (found["window"], found["stride"], found["tokens"]) == (CONTEXT, CONTEXT // 2, 99)
    assert found["windows"] == 3


@pytest.mark.parametrize("other", ["tiny_package", "tiny_source"])
def test_against_another_model(
    cli: Cli,
    int4: Path,
    text_file: Path,
    oracle: PreTrainedModel,
    ids: list[int],
    other: str,
    request: pytest.FixtureRequest,
) -> None:
    """The quantized package's own logits, one run each, beside those of transformers."""
    from onnxlm.runtime import load

    source: Path = request.getfixturevalue(other)
    options = ("--against", source, "--text", text_file, "--window", "40", "--stride", "10")
    ran = cli("eval", int4, *options, "--threads", "1", "--json")
    model = load(int4, threads=1)
    spans = positions(len(ids), 40, 10)
    ours = torch.tensor(np.stack([model.logits(ids[a:b])[-1] for a, b in spans])).double()
    theirs = predictions(oracle, ids, 40, 10)
    targets = torch.tensor(ids[1:])
    terms = kl_div(ours.log_softmax(-1), theirs.log_softmax(-1), reduction="none", log_target=True)
    kl = terms.sum(-1)
    top1 = (ours.argmax(-1) == theirs.argmax(-1)).double().mean().item()
    loss = cross_entropy(ours, targets).item()
    collapsed = kl.mean() > 0.5 or top1 < 0.5
    found = said(ran, code=int(collapsed))
    comparison, quality = found["comparison"], found["comparison"]["quality"]
    assert found["loss"] == pytest.approx(loss, rel=1e-3)
    assert quality["perplexity_reference"] == pytest.approx(
        math.exp(cross_entropy(theirs, targets).item()), rel=1e-4
    )
    assert quality["kl"] == pytest.approx(kl.mean().item(), rel=1e-2)
    assert quality["kl_max"] == pytest.approx(kl.max().item(), rel=5e-2)
    assert comparison["kl_p99"] == pytest.approx(kl.quantile(0.99).item(), rel=5e-2)
    assert quality["top1"] == pytest.approx(top1, abs=0.01)
    kind = "fp32 package" if other == "tiny_package" else "PyTorch, fp32"
    assert comparison["against"] == f"{source} ({kind})"
    assert comparison["greedy"] == agreement(model, oracle, ids)


def agreement(model: Any, oracle: PreTrainedModel, ids: list[int]) -> dict[str, Any]:
    """Token by token: the package's next token, and the one that transformers would give."""
    count = min(GREEDY_TOKENS, CONTEXT - PROMPT_TOKENS)
    lengths = []
    for number in range(PROMPTS):
        start = number * (len(ids) - PROMPT_TOKENS) // (PROMPTS - 1)
        row = ids[start : start + PROMPT_TOKENS]
        length = 0
        for _ in range(count):
            token = int(model.logits(row)[-1].argmax())
            if token != int(logits_of(oracle, row)[-1].argmax()):
                break
            row = [*row, token]
            length += 1
        lengths.append(length)
    return {
        "prompts": PROMPTS,
        "tokens": count,
        "mean": pytest.approx(sum(lengths) / PROMPTS),
        "least": min(lengths),
    }


def test_a_right_package_agrees_to_the_end(
    cli: Cli, tiny_package: Path, tiny_source: Path, text_file: Path
) -> None:
    ran = cli("eval", tiny_package, "--against", tiny_source, "--text", text_file)
    assert (ran.code, ran.err) == (0, "")
    head, text, against, _, header, *rows = ran.out.splitlines()
    assert head == f"{tiny_package}: fp32, on cpu"
    assert text.startswith("text: given text, ")
    assert text.endswith(f" of {CONTEXT} tokens, stride {CONTEXT // 2}")
    assert against == f"against: {tiny_source} (PyTorch, fp32)"
    assert header.split() == ["figure", "value"]
    figures = {row[: row.rindex("  ")].strip(): row.split()[-1] for row in rows}
    assert figures["KL, mean"] == "0.0000"
    assert figures["top-1 agreement"] == "1.000"
    count = CONTEXT - PROMPT_TOKENS
    assert figures[f"greedy tokens agreed of {count}, mean"] == f"{count}.0"
    assert figures[f"greedy tokens agreed of {count}, least"] == str(count)
    assert figures["perplexity"] == figures["perplexity of the other"]
    assert figures["verdict"] == "good"


def test_another_model_is_told_and_fails(
    cli: Cli, tiny_package: Path, text_file: Path, tmp_path: Path
) -> None:
    other = save_folder(hot_model(CONFIG, seed=9), tmp_path)
    found = said(
        cli("eval", tiny_package, "--against", other, "--text", text_file, "--json"), code=1
    )
    assert found["comparison"]["quality"]["verdict"] == "collapsed"
    assert found["comparison"]["greedy"]["mean"] < 5


def test_the_bundled_text(cli: Cli, tiny_package: Path) -> None:
    found = said(cli("eval", tiny_package, "--tokens", "70", "--json"))
    assert (found["text"], found["tokens"]) == ("bundled evaluation text", 69)


def refused(ran: Ran, *parts: str) -> None:
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1
    assert [part for part in parts if part not in ran.err] == []


def test_refusals(cli: Cli, tiny_package: Path, text_file: Path, tmp_path: Path) -> None:
    def run(*options: str | Path) -> Ran:
        return cli("eval", tiny_package, "--text", text_file, *options)

    refused(cli("eval", tmp_path / "no"), "is no package")
    refused(cli("eval", tiny_package, "--text", tmp_path / "gone.txt"), "gone.txt")
    refused(run("--window", "0"), "the window", "found 0", f"1 to {CONTEXT}")
    refused(run("--window", "65"), "the window", "found 65", f"1 to {CONTEXT}")
    refused(run("--window", "8", "--stride", "9"), "the stride", "found 9", "1 to 8")
    refused(run("--stride", "0"), "the stride", "found 0", f"1 to {CONTEXT}")
    refused(run("--against", tmp_path / "gone"), "gone")
    refused(run("--provider", "banana"), "'banana'", "cpu")
    short = tmp_path / "short.txt"
    short.write_text("a", encoding="utf-8")
    refused(cli("eval", tiny_package, "--text", short), "too short", "found 1 tokens")
    other = save_folder(hot_model({**CONFIG, "vocab_size": 100}), tmp_path / "other")
    refused(run("--against", other), "its tokens are not the package's", "a vocabulary of 100")


def test_without_torch(tiny_package: Path, int4: Path, text_file: Path) -> None:
    """Two packages are compared by the runtime alone."""
    options = ("--against", tiny_package, "--text", text_file, "--json", "--tokens", "40")
    ran = run_process("eval", int4, *options, environment={"PYTHONPROFILEIMPORTTIME": "1"})
    modules = {line.rsplit("|", 1)[-1].strip() for line in ran.err.splitlines()}
    assert "onnxruntime" in modules
    assert not modules & {"torch", "transformers", "onnx"}
    assert open_package(int4).manifest.precision == json.loads(ran.out)["precision"]
