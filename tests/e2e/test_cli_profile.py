"""`onnxlm profile` on a tiny package."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import Ran
from support.tiny import CONTEXT

from onnxlm.cli import output_files
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
        (("--html", "."), ".: is a folder; name a file"),
        (("--kv-budget", "much"), "kv_budget; found 'much'; allowed: a number of bytes"),
        (("--device-id", "-1"), "device_id; found -1; allowed: 0 or more"),
    ],
)
def test_bad_options_are_one_line(
    cli: Cli, tiny_package: Path, options: tuple[str, ...], message: str
) -> None:
    ran = cli("profile", tiny_package, *options)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"error: {message}")
    assert ran.err.count("\n") == 1


def test_a_page_that_cannot_be_written_costs_no_tables(
    cli: Cli, tiny_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(output_files, "write_whole", full)
    ran = cli("profile", tiny_package, *QUICK, "--html", tmp_path / "out.html")
    assert ran.code == 2
    assert "A decode step" in ran.out
    assert ran.err.splitlines()[-1].endswith("cannot be written; found No space left on device")


def test_a_fallback_is_allowed(cli: Cli, tiny_package: Path) -> None:
    if find_provider("cuda").unavailable() is None:
        pytest.skip("there is a CUDA device")
    ran = cli("profile", tiny_package, *QUICK, "--provider", "cuda", "--allow-fallback")
    assert ran.code == 0, ran.err
    assert "fp32 on CPUExecutionProvider" in ran.out
    assert "fell back: " in ran.err


def test_an_absent_provider_is_one_line(cli: Cli, tiny_package: Path) -> None:
    if find_provider("cuda").unavailable() is None:
        pytest.skip("there is a CUDA device")
    ran = cli("profile", tiny_package, *QUICK, "--provider", "cuda")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: execution provider 'cuda' cannot be used: ")
