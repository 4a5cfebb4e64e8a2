"""Every sampling field from the command line: what the runtime gives for the same values."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.commands import Ran

from onnxlm.cli.generation_options import SamplingOptions
from onnxlm.runtime import Generation, LanguageModel, load
from onnxlm.runtime.sampling_params import SamplingParams

Cli = Callable[..., Ran]
PROMPT = "The capital"


@pytest.fixture(scope="module")
def model(tiny_package: Path) -> LanguageModel:
    return load(tiny_package, threads=1)


def facts(ran: Ran) -> dict[str, Any]:
    assert (ran.code, ran.err) == (0, "")
    return dict(json.loads(ran.out))


def test_every_field_has_an_option() -> None:
    options = {field.name for field in dataclasses.fields(SamplingOptions)}
    assert options == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (["--temperature", "20", "--seed", "3"], {"temperature": 20, "seed": 3}),
        (["--top-k", "9", "--seed", "3"], {"top_k": 9, "seed": 3}),
        (["--top-p", "0.9", "--seed", "3"], {"top_p": 0.9, "seed": 3}),
        (["--min-p", "0.001", "--seed", "3"], {"min_p": 0.001, "seed": 3}),
        (["--typical-p", "0.9", "--seed", "3"], {"typical_p": 0.9, "seed": 3}),
        (["--do-sample", "--seed", "3"], {"do_sample": True, "seed": 3}),
        (["--greedy", "--top-k", "9"], {"do_sample": False}),
        (["--repetition-penalty", "1.5"], {"repetition_penalty": 1.5}),
        (["--presence-penalty", "9"], {"presence_penalty": 9}),
        (["--frequency-penalty", "9"], {"frequency_penalty": 9}),
        (["--no-repeat-ngram-size", "1"], {"no_repeat_ngram_size": 1}),
        (["--logit-bias", "9=400", "--logit-bias", "8=1"], {"logit_bias": {9: 400.0, 8: 1.0}}),
        (
            ["--sequence-bias", "9,9=-4", "--sequence-bias", "9=400"],
            {"sequence_bias": [[[9, 9], -4.0], [[9], 400.0]]},
        ),
        (["--eos-token-id", ""], {"eos_token_id": []}),
        (["--begin-suppress-tokens", "1,2"], {"begin_suppress_tokens": [1, 2]}),
        (
            ["--num-beams", "3", "--length-penalty", "2", "--early-stopping", "never"],
            {"num_beams": 3, "length_penalty": 2.0, "early_stopping": "never"},
        ),
        (
            ["--num-beams", "2", "--early-stopping", "true"],
            {"num_beams": 2, "early_stopping": True},
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_an_option_is_its_field(
    cli: Cli,
    tiny_package: Path,
    model: LanguageModel,
    options: list[str],
    fields: dict[str, Any],
) -> None:
    ran = cli("generate", tiny_package, PROMPT, "--max-new-tokens", "8", "--json", *options)
    expected = model.generate(PROMPT, max_new_tokens=8, **fields)
    assert facts(ran)["token_ids"] == expected.token_ids


def test_options_that_name_tokens_of_the_text(
    cli: Cli, tiny_package: Path, model: LanguageModel
) -> None:
    """Greedy tokens, one of which is forbidden, ends the text, or is wanted later."""
    plain = model.generate(PROMPT, max_new_tokens=8).token_ids
    third = plain[2]

    def told(*options: str) -> dict[str, Any]:
        return facts(
            cli("generate", tiny_package, PROMPT, "--max-new-tokens", "8", "--json", *options)
        )

    assert third not in told("--suppress-tokens", f"{third},1")["token_ids"]
    assert third not in told("--bad-words-ids", str(third), "--bad-words-ids", "1,2")["token_ids"]
    first = plain.index(third)
    stopped = told("--stop-token-ids", str(third))
    assert (stopped["token_ids"], stopped["finish_reason"]) == (plain[: first + 1], "stop")
    ended = told("--eos-token-id", f"{third},1")
    assert (ended["token_ids"], ended["finish_reason"]) == (plain[: first + 1], "eos")
    later = told("--eos-token-id", str(third), "--min-new-tokens", "5")["token_ids"]
    assert len(later) > 4
    assert (
        later
        == told("--eos-token-id", str(third), "--min-length", str(5 + len(model.encode(PROMPT))))[
            "token_ids"
        ]
    )
    text = model.tokenizer.decode(plain)
    cut = told("--stop-strings", "never this", "--stop-strings", text[3:5])
    assert (cut["text"], cut["finish_reason"]) == (text[: text.index(text[3:5])], "stop")


def listed(result: Generation) -> list[tuple[int, list[int]]]:
    return [(one.token_id, [i for i, _ in one.top]) for one in result.logprobs or ()]


def test_log_probabilities_and_alternatives_in_json(
    cli: Cli, tiny_package: Path, model: LanguageModel
) -> None:
    beams = ("--num-beams", "3", "--num-return-sequences", "2", "--max-new-tokens", "4")
    said = facts(cli("generate", tiny_package, PROMPT, *beams, "--logprobs", "2", "--json"))
    result = model.generate(
        PROMPT, num_beams=3, num_return_sequences=2, max_new_tokens=4, logprobs=2
    )
    (other,) = result.alternatives
    for told, expected in ((said, result), (said["alternatives"][0], other)):
        assert (told["text"], told["token_ids"]) == (expected.text, expected.token_ids)
        assert told["score"] == pytest.approx(expected.score)
        rows = [
            (one["token_id"], [top["token_id"] for top in one["top"]]) for one in told["logprobs"]
        ]
        assert rows == listed(expected)
        values = [one["logprob"] for one in told["logprobs"]]
        assert values == pytest.approx([one.logprob for one in expected.logprobs or ()])
    plain = facts(cli("generate", tiny_package, PROMPT, "--max-new-tokens", "4", "--json"))
    assert "logprobs" not in plain
    assert (plain["score"], plain["alternatives"]) == (None, [])


def test_log_probabilities_and_alternatives_for_people(
    cli: Cli, tiny_package: Path, model: LanguageModel
) -> None:
    options = (
        "--num-return-sequences",
        "2",
        "--temperature",
        "9",
        "--seed",
        "4",
        "--logprobs",
        "1",
    )
    ran = cli("generate", tiny_package, PROMPT, "--max-new-tokens", "3", *options)
    first, second = (
        model.generate(PROMPT, max_new_tokens=3, temperature=9, seed=seed, logprobs=1)
        for seed in (4, 5)
    )
    assert (ran.code, ran.out) == (0, f"{first.text}\n--- 2\n{second.text}\n")
    lines = ran.err.splitlines()
    assert len(lines) == len(first.token_ids) + 1
    for line, told in zip(lines, first.logprobs or (), strict=False):
        text = model.tokenizer.decode([told.token_id], skip_special_tokens=False)
        assert line.startswith(f"{text!r} {told.logprob:.3f}  ")


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("--suppress-tokens", "1;2", "token ids with commas between them, as in 4,2"),
        ("--stop-token-ids", "4,", "token ids with commas between them, as in 4,2"),
        ("--early-stopping", "yes", "true, false or never"),
    ],
)
def test_what_cannot_be_read(
    cli: Cli, tiny_package: Path, option: str, value: str, allowed: str
) -> None:
    ran = cli("generate", tiny_package, PROMPT, option, value)
    assert ran == Ran(2, "", f"error: option {option}; found {value}; allowed: {allowed}\n")


def test_a_bias_that_cannot_be_read(cli: Cli, tiny_package: Path) -> None:
    for option, value in (("--logit-bias", "5"), ("--sequence-bias", "1,2=x")):
        ran = cli("generate", tiny_package, PROMPT, option, value)
        assert ran.code == 2
        assert f"error: option {option}; found ['{value}']; allowed: " in ran.err


def test_a_value_out_of_bounds_is_refused_by_field(cli: Cli, tiny_package: Path) -> None:
    ran = cli("generate", tiny_package, PROMPT, "--suppress-tokens", "99999")
    assert (ran.code, ran.out) == (2, "")
    assert "error: generation field 'suppress_tokens'; found 99999; allowed: token ids" in ran.err
    ran = cli("generate", tiny_package, PROMPT, "--num-beams", "2", "--temperature", "1")
    assert "generation field 'num_beams'; found 2; allowed: 1 where tokens are drawn" in ran.err


def test_help_has_panels(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """For people, on a terminal."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    ran = cli("generate", "--help")
    for panel in ("Draws", "Penalties and bans", "End of the text", "Beams"):
        assert f" {panel} " in ran.out
