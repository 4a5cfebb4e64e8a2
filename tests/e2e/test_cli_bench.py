"""`onnxlm bench`: every row of a tiny package, the file, and what cannot be run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.commands import Ran

from onnxlm.runtime import bench_run
from onnxlm.runtime.bench import Contestant, Sample, time_run
from onnxlm.runtime.bench_child import Footprint
from onnxlm.runtime.providers import find_provider

Cli = Callable[..., Ran]
QUICK = ("--new-tokens", "3", "--repeats", "2", "--threads", "1")


@pytest.fixture
def no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Footprints without new processes."""
    footprint = Footprint(0.25, 300_000_000, 200_000_000, 50_000_000, "")
    monkeypatch.setattr(bench_run, "measure_footprint", lambda *rest: footprint)


def test_a_table_and_a_file(cli: Cli, tiny_package: Path, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    ran = cli("bench", tiny_package, "--prompt-tokens", "8,16", *QUICK, "--json", file)
    assert ran.code == 0, ran.err
    first, header, *rows = ran.out.splitlines()
    assert first.endswith("1 threads; 3 new tokens, 2 rounds: median (lowest-highest)")
    assert header.split()[:4] == ["model", "provider", "precision", "prompt"]
    assert [row.split()[:4] for row in rows] == [
        ["package", "cpu", "fp32", "8"],
        ["package", "cpu", "fp32", "16"],
    ]
    value = json.loads(file.read_text(encoding="utf-8"))
    manifest = json.loads((tiny_package / "onnxlm.json").read_text(encoding="utf-8"))
    graphs = ("prefill.onnx", "decode.onnx", "model.onnx_data")
    for row in value["rows"]:
        assert (row["repeats"], row["failure"]) == (2, None)
        assert row["runs_on"] == "CPUExecutionProvider"
        assert row["label"]["file_bytes"] == sum(manifest["files"][n]["bytes"] for n in graphs)
        spread = row["speed"]["decode_tokens_per_s"]
        assert 0 < spread["low"] <= spread["median"] <= spread["high"]
        assert row["footprint"]["load_s"] > 0


@pytest.mark.usefixtures("no_children")
def test_an_absent_provider_is_a_row(cli: Cli, tiny_package: Path) -> None:
    why = find_provider("cuda").unavailable()
    if why is None:
        pytest.skip("there is a CUDA device")
    ran = cli("bench", tiny_package, "--provider", "cpu,cuda", "--prompt-tokens", "8", *QUICK)
    assert ran.code == 0, ran.err
    _, _, cpu, cuda, remark = ran.out.splitlines()
    assert "not run" not in cpu
    assert cuda.split()[:2] == ["package", "cuda"]
    assert "not run" in cuda
    assert remark == f"not run: package on cuda, prompt 8: {why}"


def test_nothing_run_is_an_error(cli: Cli, tiny_package: Path) -> None:
    if find_provider("cuda").unavailable() is None:
        pytest.skip("there is a CUDA device")
    ran = cli("bench", tiny_package, "--provider", "cuda", "--prompt-tokens", "8", *QUICK)
    assert ran.code == 2
    assert ran.out.splitlines()[-1].startswith("not run: package on cuda, prompt 8: ")


@pytest.mark.usefixtures("no_children")
def test_a_fallback_is_labelled(cli: Cli, tiny_package: Path) -> None:
    if find_provider("cuda").unavailable() is None:
        pytest.skip("there is a CUDA device")
    options = ("--provider", "cuda", "--allow-fallback", "--prompt-tokens", "8")
    ran = cli("bench", tiny_package, *options, *QUICK)
    assert ran.code == 0, ran.err
    assert "cuda (ran on CPU)" in ran.out.splitlines()[2]


@pytest.mark.usefixtures("no_children")
def test_the_eager_model_is_compared_in_the_same_rounds(
    cli: Cli, tiny_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[str] = []

    def timed(contestant: Contestant, ids: Sequence[int], new_tokens: int) -> Sample:
        turns.append(type(contestant).__name__)
        return time_run(contestant, ids, new_tokens)

    monkeypatch.setattr(bench_run, "time_run", timed)
    ran = cli("bench", tiny_package, "--baseline", "torch", "--prompt-tokens", "8", *QUICK)
    assert ran.code == 0, ran.err
    assert turns == ["PackageContestant", "EagerContestant"] * 3
    assert ran.out.splitlines()[3].split()[:4] == ["eager", "model", "torch", "fp32"]
    ratio = ran.out.splitlines()[4]
    assert ratio.startswith("package on cpu by eager model, prompt 8: prefill ")


@pytest.mark.usefixtures("no_children")
def test_ctrl_c_prints_and_writes_what_is_done(
    cli: Cli, tiny_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []

    def timed(contestant: Contestant, ids: Sequence[int], new_tokens: int) -> Sample:
        runs.append(len(ids))
        if len(runs) == 5:
            raise KeyboardInterrupt
        return time_run(contestant, ids, new_tokens)

    monkeypatch.setattr(bench_run, "time_run", timed)
    file = tmp_path / "bench.json"
    ran = cli("bench", tiny_package, "--prompt-tokens", "8,16", *QUICK, "--json", file)
    assert ran.code == 130
    assert runs == [8, 16, 8, 16, 8]
    value = json.loads(file.read_text(encoding="utf-8"))
    assert value["interrupted"] is True
    assert [row["repeats"] for row in value["rows"]] == [1, 1]
    assert len(ran.out.splitlines()) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--provider", "cudaa"), "execution provider is not known; found 'cudaa'; allowed: "),
        (("--baseline", "jax"), "--baseline; found 'jax'; allowed: torch"),
        (("--prompt-tokens", "8,x"), "--prompt-tokens"),
        (("--json", "nowhere/at/all.json"), "nowhere/at/all.json: there is no such folder"),
    ],
)
def test_bad_options_are_one_line(
    cli: Cli, tiny_package: Path, options: tuple[str, ...], message: str
) -> None:
    ran = cli("bench", tiny_package, *options)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"error: {message}")
    assert ran.err.count("\n") == 1


def test_no_package_is_one_line(cli: Cli, tmp_path: Path) -> None:
    ran = cli("bench", tmp_path / "nothing")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"error: {tmp_path / 'nothing'}: is no package")
