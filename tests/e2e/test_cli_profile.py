"""`onnxlm profile` on a tiny package."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import Ran
from support.tiny import CONTEXT

from onnxlm.runtime.providers import find_provider

Cli = Callable[..., Ran]
QUICK = ("--prompt-tokens", "16", "--new-tokens", "4", "--repeats", "2", "--threads", "1")


def test_tables_and_a_page(cli: Cli, tiny_package: Path, tmp_path: Path) -> None:
    page = tmp_path / "profile.html"
    ran = cli("profile", tiny_package, *QUICK, "--html", page)
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    assert lines[0] == (
        f"{tiny_package}: fp32 on CPUExecutionProvider, 1 threads; "
        "prompt 16, 4 new tokens, batch 1, means of 2 runs"
    )
    titles = [lines[i + 1] for i, line in enumerate(lines) if not line]
    assert titles == ["Prefill of a prompt", "A decode step", "By layer"]
    assert [line.split("  ")[0] for line in lines[-4:]] == [
        "embedding",
        "layer 0",
        "layer 1",
        "head",
    ]
    assert "without the profiler" in ran.err
    assert "onnxlm profile" in page.read_text(encoding="utf-8")


def test_one_json_object(cli: Cli, tiny_package: Path) -> None:
    ran = cli("profile", tiny_package, *QUICK, "--json")
    assert ran.code == 0, ran.err
    value = json.loads(ran.out)
    assert (value["prompt_tokens"], value["new_tokens"], value["repeats"]) == (16, 4, 2)
    assert [phase["name"] for phase in value["phases"]] == ["prefill", "decode"]
    assert [phase["calls"] for phase in value["phases"]] == [2, 6]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--provider", "cudaa"), "execution provider is not known; found 'cudaa'"),
        (
            ("--prompt-tokens", "8", "--new-tokens", "1"),
            "--new-tokens; found 1; allowed: 2 or more",
        ),
        (
            ("--prompt-tokens", str(CONTEXT)),
            "prompt and new tokens do not fit the context; found 96",
        ),
        (("--html", "nowhere/at/all.html"), "nowhere/at/all.html: there is no such folder"),
    ],
)
def test_bad_options_are_one_line(
    cli: Cli, tiny_package: Path, options: tuple[str, ...], message: str
) -> None:
    ran = cli("profile", tiny_package, *options)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"error: {message}")
    assert ran.err.count("\n") == 1


def test_an_absent_provider_is_one_line(cli: Cli, tiny_package: Path) -> None:
    if find_provider("cuda").unavailable() is None:
        pytest.skip("there is a CUDA device")
    ran = cli("profile", tiny_package, *QUICK, "--provider", "cuda")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: execution provider 'cuda' cannot be used: ")
