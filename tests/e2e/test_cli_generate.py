"""`onnxlm generate`: the text that transformers would give, as it comes, and a line on speed."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import Ran, run_process
from support.tiny import TEMPLATE
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

Cli = Callable[..., Ran]
SPEED = re.compile(
    r"cpu: TTFT \d+ ms for (\d+) prompt tokens, \d+\.\d tok/s, (\d+) new tokens \(ended by (\w+)\)\n"
)
PROMPT = "The capital"


@pytest.fixture(scope="module")
def continuation(tiny_source: Path) -> Callable[[str, int], tuple[list[int], str]]:
    """Greedy ids and text of transformers behind a prompt."""
    model = AutoModelForCausalLM.from_pretrained(tiny_source, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(tiny_source / "tokenizer.json"))

    def generate(prompt: str, count: int) -> tuple[list[int], str]:
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
        )
        new = made[0, ids.shape[1] :].tolist()
        return new, tokenizer.decode(new)

    return generate


Continuation = Callable[[str, int], tuple[list[int], str]]


def test_text_on_one_stream_and_speed_on_the_other(
    tiny_package: Path, continuation: Continuation
) -> None:
    ids, text = continuation(PROMPT, 20)
    ran = run_process("generate", tiny_package, PROMPT, "--max-new-tokens", "20")
    assert (ran.code, ran.out) == (0, f"{text}\n")
    speed = SPEED.fullmatch(ran.err)
    assert speed, ran.err
    assert int(speed[2]) == len(ids)


def test_text_comes_piece_by_piece(
    cli: Cli, tiny_package: Path, continuation: Continuation, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[str] = []

    class Recorder:
        def write(self, text: str) -> None:
            pieces.append(text)

        def isatty(self) -> bool:
            return False

        def flush(self) -> None:
            pieces.append("flushed")

    monkeypatch.setattr(sys, "stdout", Recorder())
    assert cli("generate", tiny_package, PROMPT, "--max-new-tokens", "20").code == 0
    written = [piece for piece in pieces if piece != "flushed"]
    assert len(written) > 5
    assert "".join(written) == continuation(PROMPT, 20)[1] + "\n"
    assert pieces[1] == "flushed"


def facts(ran: Ran) -> dict[str, Any]:
    assert (ran.code, ran.err) == (0, "")
    return dict(json.loads(ran.out))


def test_json(cli: Cli, tiny_package: Path, continuation: Continuation) -> None:
    ids, text = continuation(PROMPT, 12)
    said = facts(cli("generate", tiny_package, PROMPT, "--max-new-tokens", "12", "--json"))
    assert (said["text"], said["token_ids"]) == (text, ids)
    assert said["finish_reason"] in ("length", "eos")
    assert (said["provider"], said["fallback"]) == ("cpu", None)
    assert said["ttft_ms"] > 0
    assert said["decode_tokens_per_s"] > 0
    assert len(said["token_ids"]) <= 12


def test_prompt_from_standard_input(tiny_package: Path, continuation: Continuation) -> None:
    """One newline at the end is the shell's; all else is the prompt."""
    for given, prompt in ((b"The capital\n", "The capital"), ("é\n\n".encode(), "é\n")):
        ran = run_process("generate", tiny_package, "-", "--max-new-tokens", "6", stdin=given)
        assert ran.out == continuation(prompt, 6)[1] + "\n"


def test_chat_wraps_the_prompt(cli: Cli, tiny_package: Path, continuation: Continuation) -> None:
    ids, _ = continuation("<user>hi</user><assistant>", 6)
    assert "{{ message.content }}" in TEMPLATE
    said = facts(cli("generate", tiny_package, "hi", "--chat", "--max-new-tokens", "6", "--json"))
    assert said["token_ids"] == ids
    assert said["token_ids"] != continuation("hi", 6)[0]


def test_draws_repeat_with_their_seed(cli: Cli, tiny_package: Path) -> None:
    def drawn(*options: str) -> list[int]:
        fixed = ("--max-new-tokens", "16", "--json", "--temperature", "40")
        return list(facts(cli("generate", tiny_package, PROMPT, *fixed, *options))["token_ids"])

    assert drawn("--seed", "1") == drawn("--seed", "1")
    assert drawn("--seed", "1") != drawn("--seed", "2")
    greedy = facts(cli("generate", tiny_package, PROMPT, "--max-new-tokens", "16", "--json"))
    assert drawn("--top-k", "1") == greedy["token_ids"]
    assert drawn("--top-p", "0") == greedy["token_ids"]


@pytest.mark.parametrize("threads", ["1", "2"])
def test_threads_change_no_token(
    cli: Cli, tiny_package: Path, continuation: Continuation, threads: str
) -> None:
    options = ("--max-new-tokens", "12", "--threads", threads, "--json")
    assert (
        facts(cli("generate", tiny_package, PROMPT, *options))["token_ids"]
        == (continuation(PROMPT, 12)[0])
    )


def test_it_stops_at_the_end_of_the_context(cli: Cli, tiny_package: Path) -> None:
    said = facts(cli("generate", tiny_package, PROMPT, "--max-new-tokens", "1000", "--json"))
    assert said["finish_reason"] in ("context", "eos")
    assert said["prompt_tokens"] + len(said["token_ids"]) <= 65


def test_a_package_without_a_chat_template_says_so(
    cli: Cli, tiny_source: Path, tmp_path: Path
) -> None:
    import shutil

    source = Path(shutil.copytree(tiny_source, tmp_path / "source"))
    (source / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}', encoding="utf-8")
    assert cli("export", source, tmp_path / "out").code == 0
    ran = cli("generate", tmp_path / "out", "hi", "--chat")
    expected = f"error: {tmp_path / 'out'}: has no chat template; generate from plain text\n"
    assert ran == Ran(2, "", expected)
