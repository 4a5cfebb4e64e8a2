"""The command as a whole: help, version, exit codes, and what reaches a terminal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import Ran, run_process

from onnxlm import __version__
from onnxlm.cli.application import COMMANDS
from onnxlm.cli.providers import Providers
from onnxlm.errors import InputError, OnnxlmWarning

Cli = Callable[..., Ran]
ESCAPE = "\x1b"


def test_version(cli: Cli) -> None:
    assert cli("--version") == Ran(0, f"onnxlm {__version__}\n", "")


def test_help_lists_every_command(cli: Cli) -> None:
    ran = cli("--help")
    assert (ran.code, ran.err) == (0, "")
    listed = re.findall(r"^  (\w+)  ", ran.out, re.MULTILINE)
    assert listed == list(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_has_examples(cli: Cli, name: str) -> None:
    ran = cli(name, "--help")
    assert (ran.code, ran.err) == (0, "")
    _, _, shown = ran.out.partition("\n  Example")
    examples = COMMANDS[name].examples
    assert examples
    for example in examples:
        assert example.split()[:2] == ["onnxlm", name]
        assert f"\n  {example}\n" in shown  # on one line, to be copied


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_does(cli: Cli, name: str) -> None:
    lines = cli(name, "--help").out.partition("\n  Example")[0].splitlines()
    options = [i for i, line in enumerate(lines) if line.startswith("  --")]
    assert options
    for i in options:
        said = re.sub(r"^  --[\w-]+(, -\w)?( \S+)?", "", lines[i]).strip()
        assert said or lines[i + 1].startswith(" " * 20), lines[i]


def test_an_unknown_command_is_a_usage_error(cli: Cli) -> None:
    ran = cli("banana")
    assert (ran.code, ran.out) == (2, "")
    assert "No such command 'banana'" in ran.err


def test_a_missing_argument_is_a_usage_error(cli: Cli) -> None:
    ran = cli("export", "model")
    assert (ran.code, ran.out) == (2, "")
    assert "Missing argument 'OUT'" in ran.err


def test_help_imports_no_heavy_library() -> None:
    code = (
        "import sys\nfrom onnxlm.cli import main\n"
        "try:\n    main(['export', '--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'onnx', 'onnx_ir', 'onnxruntime', 'numpy'}\n"
        "sys.exit(', '.join(sorted(heavy & sys.modules.keys())) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let `onnxlm providers` fail."""

    def run(self: Providers) -> None:
        raise error

    monkeypatch.delenv("ONNXLM_DEBUG", raising=False)
    monkeypatch.setattr(Providers, "run", run)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InputError("a field", found=3), Ran(2, "", "error: a field; found 3\n")),
        (KeyboardInterrupt(), Ran(130, "", "")),
        (
            PermissionError(13, "Permission denied", "/root/x"),
            Ran(2, "", "error: /root/x: Permission denied\n"),
        ),
        (
            OSError(28, "No space left on device"),
            Ran(2, "", "error: No space left on device\n"),
        ),
        (MemoryError(), Ran(2, "", "error: there is not enough memory for this\n")),
        (
            ModuleNotFoundError("No module named 'torch'", name="torch"),
            Ran(
                2,
                "",
                "error: this needs the library 'torch', which is not installed; "
                "pip install 'onnxlm[export]'\n",
            ),
        ),
        (
            ModuleNotFoundError("No module named 'onnxlm.x'", name="onnxlm.x"),
            Ran(
                1,
                "",
                "error: a bug in onnxlm: ModuleNotFoundError: No module named 'onnxlm.x'; "
                "ONNXLM_DEBUG=1 shows where, please report it\n",
            ),
        ),
        (
            ValueError("two\nlines"),
            Ran(
                1,
                "",
                "error: a bug in onnxlm: ValueError: two lines; "
                "ONNXLM_DEBUG=1 shows where, please report it\n",
            ),
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_an_exception_is_one_line_and_an_exit_code(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, error: BaseException, expected: Ran
) -> None:
    failing(monkeypatch, error)
    assert cli("providers") == expected


@pytest.mark.parametrize(("error", "code"), [(ValueError("why"), 1), (InputError("why"), 2)])
def test_debug_shows_where(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    failing(monkeypatch, error)
    monkeypatch.setenv("ONNXLM_DEBUG", "1")
    ran = cli("providers")
    assert (ran.code, ran.out) == (code, "")
    assert "Traceback" in ran.err
    assert "in run\n" in ran.err
    assert ran.err.splitlines()[-1].startswith("error: ")


def test_our_warnings_are_a_line_and_those_of_libraries_are_not_shown(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    import warnings

    def run(self: Providers) -> None:
        warnings.warn("a library's own trouble", FutureWarning, stacklevel=1)
        warnings.warn("a library's own trouble", UserWarning, stacklevel=1)
        warnings.warn("fields are not carried out", OnnxlmWarning, stacklevel=1)

    monkeypatch.setattr(Providers, "run", run)
    assert cli("providers") == Ran(0, "", "warning: fields are not carried out\n")


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_without_a_traceback(
    tiny_package: Path, number: signal.Signals, code: int
) -> None:
    command = [sys.executable, "-m", "onnxlm", "generate", str(tiny_package), "-"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    time.sleep(2)  # it waits for the prompt now
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (code, b"", b"")


def on_a_terminal(*arguments: str | Path, **environment: str) -> str:
    """What a command prints where standard output and standard error are a terminal."""
    import pty

    master, slave = pty.openpty()
    kept = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "TERM")}
    process = subprocess.Popen(
        [sys.executable, "-m", "onnxlm", *map(str, arguments)],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**kept, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1", **environment},
    )
    os.close(slave)
    parts = []
    while True:
        try:
            part = os.read(master, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        parts.append(part)
    os.close(master)
    assert process.wait() == 0
    return b"".join(parts).decode()


@pytest.mark.skipif(os.name == "nt", reason="terminals of POSIX")
def test_colours_are_for_terminals_that_want_them() -> None:
    piped = run_process("providers")
    assert piped.code == 0
    assert ESCAPE not in piped.out + piped.err
    assert "─" not in piped.out
    shown = on_a_terminal("providers")
    assert "─" in shown
    assert f"{ESCAPE}[1m" in shown
    assert not re.search(ESCAPE + r"\[[\d;]*3\dm", on_a_terminal("providers", NO_COLOR="1"))


@pytest.mark.skipif(os.name == "nt", reason="terminals of POSIX")
def test_an_export_shows_its_stages_on_a_terminal(tiny_source: Path, tmp_path: Path) -> None:
    shown = on_a_terminal("export", tiny_source, tmp_path / "out")
    stages = ["read checkpoint", "trace", "fuse", "write weights"]
    places = [shown.find(stage) for stage in stages]
    assert -1 not in places
    assert places == sorted(places)
