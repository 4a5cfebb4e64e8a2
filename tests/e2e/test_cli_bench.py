"""`onnxlm bench`: every row of a tiny package, its files, what cannot be run, and Ctrl-C."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.commands import Ran
from support.reports import contestant, report, row

from onnxlm.runtime import bench_run
from onnxlm.runtime.bench_footprint import Footprint
from onnxlm.runtime.bench_report import read_report
from onnxlm.runtime.providers import find_provider

Cli = Callable[..., Ran]
QUICK = ("--new-tokens", "3", "--repeats", "2", "--threads", "1")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without processes for footprints and the machine's rates."""
    footprint = Footprint(0.25, 0.5, 300_000_000, 200_000_000, 50_000_000, "")
    monkeypatch.setattr(bench_run, "measure_footprint", lambda *rest: footprint)
    monkeypatch.setattr(bench_run._Machine, "open", lambda self, threads: None)


def test_tables_and_files(cli: Cli, tiny_package: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / f"bench.{name}" for name in ("json", "markdown", "html")}
    options = [part for name, file in files.items() for part in (f"--{name}", file)]
    ran = cli("bench", tiny_package, "--prompt-tokens", "8,16", "--batch", "2", *QUICK, *options)
    assert ran.code == 0, ran.err
    first, _, title, header, *rows = ran.out.splitlines()
    assert first.endswith("2 rounds: median (lowest-highest); threads 1; new 3; batch 2")
    assert title == "Speed"
    assert header.split()[:4] == ["model", "provider", "precision", "prompt"]
    assert [line.split()[:4] for line in rows[:2]] == [
        ["package", "cpu", "fp32", "8"],
        ["package", "cpu", "fp32", "16"],
    ]
    found = read_report(files["json"])
    manifest = json.loads((tiny_package / "onnxlm.json").read_text(encoding="utf-8"))
    graphs = ("prefill.onnx", "decode.onnx", "model.onnx_data")
    (who,) = found.contestants
    assert who.runs_on == "CPUExecutionProvider"
    assert who.label.file_bytes == sum(manifest["files"][n]["bytes"] for n in graphs)
    assert who.footprint is not None
    assert who.footprint.load_s > 0
    for one in found.rows:
        assert (one.repeats, one.failure, one.case.batch) == (2, None, 2)
        assert one.speed is not None
        spread = one.speed.decode_tokens_per_s
        assert spread is not None
        assert 0 < spread.low <= spread.median <= spread.high
        assert (one.decode_of_roofline or 0) > 0
    assert found.rates[0].threads == 1
    assert "| package | cpu | fp32 | 8 |" in files["markdown"].read_text(encoding="utf-8")
    assert '<td class="word">package</td>' in files["html"].read_text(encoding="utf-8")


@pytest.mark.usefixtures("quick")
def test_decoding_by_context_length(cli: Cli, tiny_package: Path, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    options = ("--prompt-tokens", "8", "--context-lengths", "40,4", "--json", file)
    ran = cli("bench", tiny_package, *options, *QUICK)
    assert ran.code == 0, ran.err
    assert "Decode tok/s by context length" in ran.out
    (curve,) = read_report(file).curves
    assert curve.case.context_lengths == (4, 40)
    assert [point.context_length for point in curve.points] == [4, 40]


@pytest.mark.usefixtures("quick")
def test_an_absent_provider_is_a_row(cli: Cli, tiny_package: Path) -> None:
    why = find_provider("cuda").unavailable()
    if why is None:
        pytest.skip("there is a CUDA device")
    ran = cli("bench", tiny_package, "--provider", "cpu,cuda", "--prompt-tokens", "8", *QUICK)
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    assert "not run" not in lines[4]
    assert lines[5].split()[:2] == ["package", "cuda"]
    assert "not run" in lines[5]
    assert f"not run: package on cuda, prompt 8: {why}" in lines


def test_nothing_run_is_an_error(cli: Cli, tiny_package: Path) -> None:
    if find_provider("cuda").unavailable() is None:
        pytest.skip("there is a CUDA device")
    ran = cli("bench", tiny_package, "--provider", "cuda", "--prompt-tokens", "8", *QUICK)
    assert ran.code == 2
    assert ran.out.splitlines()[-1].startswith("not run: package on cuda, prompt 8: ")


@pytest.mark.usefixtures("quick")
def test_a_fallback_is_labelled(cli: Cli, tiny_package: Path) -> None:
    if find_provider("cuda").unavailable() is None:
        pytest.skip("there is a CUDA device")
    options = ("--provider", "cuda", "--allow-fallback", "--prompt-tokens", "8")
    ran = cli("bench", tiny_package, *options, *QUICK)
    assert ran.code == 0, ran.err
    assert "cuda (ran on CPU)" in ran.out.splitlines()[4]


@pytest.mark.usefixtures("quick")
def test_another_interpreter_takes_part_in_the_rounds(
    cli: Cli, tiny_package: Path, tmp_path: Path
) -> None:
    # A program of another name, so that its process inherits no path to import from.
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n', encoding="utf-8")
    other.chmod(0o755)
    file = tmp_path / "bench.json"
    options = ("--python", f"cpu={other}", "--prompt-tokens", "8", "--json", file)
    ran = cli("bench", tiny_package, *options, *QUICK)
    assert ran.code == 0, ran.err
    (one,) = read_report(file).rows
    assert one.repeats == 2


@pytest.mark.usefixtures("quick")
def test_an_interpreter_without_the_libraries_is_a_row(
    cli: Cli, tiny_package: Path, tmp_path: Path
) -> None:
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n', encoding="utf-8")
    other.chmod(0o755)
    options = ("--provider", "cpu", "--python", f"cpu={other}", "--prompt-tokens", "8")
    ran = cli("bench", tiny_package, *options, *QUICK)
    assert ran.code == 2
    why = "its process ended with code 1: ModuleNotFoundError: No module named"
    assert f"not run: package on cpu, prompt 8: {why}" in ran.out


@pytest.mark.usefixtures("quick")
def test_the_eager_model_is_compared_in_the_same_rounds(
    cli: Cli, tiny_package: Path, tmp_path: Path
) -> None:
    file = tmp_path / "bench.json"
    options = ("--baseline", "torch", "--prompt-tokens", "8", "--json", file)
    ran = cli("bench", tiny_package, *options, *QUICK, "--batch", "2")
    assert ran.code == 0, ran.err
    assert ran.out.splitlines()[5].split()[:4] == ["eager", "PyTorch", "torch", "fp32"]
    ratio = ran.out.splitlines()[-1]
    assert ratio.startswith("package on cpu, prompt 8 by eager PyTorch: prefill ")
    assert [one.repeats for one in read_report(file).rows] == [2, 2]


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_the_compiled_model_is_a_baseline(cli: Cli, tiny_package: Path) -> None:
    options = ("--baseline", "torch.compile", "--prompt-tokens", "8")
    ran = cli("bench", tiny_package, *options, *QUICK)
    assert ran.code == 0, ran.err
    line = ran.out.splitlines()[5].split()
    assert line[:5] == ["compiled", "PyTorch", "torch.compile", "fp32", "8"]
    assert line[5] != "not"


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_ctrl_c_shows_and_writes_what_is_done(tiny_package: Path, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    command = ["bench", str(tiny_package), "--prompt-tokens", "8", "--new-tokens", "3"]
    command += ["--repeats", "100000", "--threads", "1", "--json", str(file)]
    process = subprocess.Popen(
        [sys.executable, "-m", "onnxlm", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,  # Ctrl-C reaches the whole group of a terminal, the children too
    )
    time.sleep(12)  # well into the rounds
    os.killpg(process.pid, signal.SIGINT)
    try:
        out, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # it would run for hours
        raise
    assert process.returncode == 130, err
    assert "Traceback" not in err
    found = read_report(file)
    assert found.interrupted
    assert 0 < found.rows[0].repeats < 100_000
    assert len(found.rows[0].rounds) == found.rows[0].repeats
    assert out.splitlines()[4].split()[:4] == ["package", "cpu", "fp32", "8"]


STEADY = [100.0, 101.0, 99.0, 100.5, 99.5]


@pytest.fixture
def two_reports(tmp_path: Path) -> list[Path]:
    """An old one, and one whose decoding is a fifth slower."""
    files = []
    for name, factor in (("old", 1.0), ("new", 0.8)):
        made = report([contestant("m")], [row(0, STEADY, [v * factor for v in STEADY])])
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(made.to_json(), encoding="utf-8")
    return files


def test_two_files_are_compared_without_a_run(cli: Cli, two_reports: list[Path]) -> None:
    old, new = two_reports
    ran = cli("bench", "--compare", old, new)
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    title = next(i for i, line in enumerate(lines) if line.startswith("Changes "))
    assert lines[title].startswith("Changes (changed: the rounds differ (Mann-Whitney, p <= 0.05)")
    header, *rows = lines[title + 1 :]
    assert header.split()[-1] == "verdict"
    # The rounds', then load, first run and two of memory.
    assert [line.split()[-1] for line in rows] == ["noise", "noise", "worse", *"----"]


@pytest.mark.usefixtures("quick")
def test_a_run_is_compared_with_a_file(cli: Cli, tiny_package: Path, tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    options = ("--prompt-tokens", "8", *QUICK)
    assert cli("bench", tiny_package, *options, "--json", file).code == 0
    ran = cli("bench", tiny_package, *options, "--compare", file)
    assert ran.code == 0, ran.err
    # Two rounds in each cannot tell anything from noise.
    changes = ran.out.partition("Changes (")[2].splitlines()[2:]
    assert [line.split()[-1] for line in changes[:3]] == ["noise"] * 3
    assert {line.split()[-1] for line in changes[3:]} == {"-"}


def test_reports_of_other_packages_have_nothing_in_common(
    cli: Cli, two_reports: list[Path], tmp_path: Path
) -> None:
    other = tmp_path / "other.json"
    made = report([contestant("other")], [row(0, STEADY, STEADY)])
    other.write_text(made.to_json(), encoding="utf-8")
    ran = cli("bench", "--compare", two_reports[0], other)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: the reports have nothing in common; found only in the old")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--provider", "cudaa"), "execution provider is not known; found 'cudaa'; allowed: "),
        (("--baseline", "jax"), "--baseline; found 'jax'; allowed: torch, torch.compile"),
        (("--prompt-tokens", "8,x"), "--prompt-tokens; found '8,x'; allowed: whole numbers"),
        (("--new-tokens", "0"), "--new-tokens; found '0'; allowed: whole numbers from 1"),
        (("--batch", "-1"), "--batch; found '-1'; allowed: whole numbers from 1"),
        (("--threads", "two"), "--threads; found 'two'; allowed: whole numbers from 0 (all cores)"),
        (("--threads", "1,-2"), "--threads; found '1,-2'; allowed: whole numbers from 0"),
        (("--kv-budget", "much"), "kv_budget; found 'much'; allowed: a number of bytes above 0"),
        (("--gpu-mem-limit", "0"), "gpu_mem_limit; found '0'; allowed: a number of bytes above 0"),
        (("--device-id", "-1"), "device_id; found -1; allowed: 0 or more"),
        (("--graph-capture",), "execution provider 'cpu' has no graph capture; allowed: "),
        (("--json", "."), ".: is a folder; name a file"),
        (("--markdown", "."), ".: is a folder; name a file"),
        (("--json", "no", "--html", "no"), "--json and --html name the same file; found no"),
        (("--context-lengths", "8,16"), "--context-lengths; found 8 and 16; allowed: numbers more"),
        (("--python", "cpu"), "--python; found 'cpu'; allowed: PROVIDER=PATH"),
        (("--python", "cuda=python3"), "--python cuda=python3; found 'cuda'; allowed: a provider"),
        (("--python", "cpu=/no/python"), "--python cpu=/no/python: there is no such program"),
        (("--json", "nowhere/at/all.json"), "nowhere/at/all.json: there is no such folder"),
        (("--html", "nowhere/at/all.html"), "nowhere/at/all.html: there is no such folder"),
        (("--compare", "nowhere.json"), "nowhere.json: cannot be read"),
    ],
)
def test_bad_options_are_one_line(
    cli: Cli, tiny_package: Path, options: tuple[str, ...], message: str
) -> None:
    ran = cli("bench", tiny_package, *options)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"error: {message}")
    assert ran.err.count("\n") == 1


def test_a_baseline_without_its_library_is_one_line(
    cli: Cli, tiny_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> Any:
        return None if name == "torch" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    ran = cli("bench", tiny_package, "--baseline", "torch.compile")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == (
        "error: --baseline torch.compile needs the library 'torch', which is not installed; "
        "pip install 'onnxlm[export]'\n"
    )


def test_no_package_is_one_line(cli: Cli, tmp_path: Path) -> None:
    ran = cli("bench", tmp_path / "nothing")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"error: {tmp_path / 'nothing'}: is no package")
    ran = cli("bench")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == "error: no package to measure; name the folder of one or more\n"
