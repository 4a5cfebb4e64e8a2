"""`onnxlm chat`: turns as transformers would answer them, from a pipe and from a terminal."""

from __future__ import annotations

import builtins
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.commands import Ran, run_process
from support.tiny import TEMPLATE
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

Cli = Callable[..., Ran]
Turns = Callable[..., list[str]]
SPEED = re.compile(
    r"cpu: TTFT \d+ ms for (\d+) prompt tokens, \d+\.\d tok/s, (\d+) new tokens \(ended by (\w+)\)"
)
NEW = ("--max-new-tokens", "4")


@pytest.fixture(scope="module")
def turns(tiny_source: Path) -> Turns:
    """Greedy answers of transformers to one message after the other, of 4 tokens at most."""
    model = AutoModelForCausalLM.from_pretrained(tiny_source, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(tiny_source / "tokenizer.json"))

    def answers(*messages: str, system: str | None = None) -> list[str]:
        assert TEMPLATE.startswith(
            "{% for message in messages %}<user>{{ message.content }}</user>"
        )
        said = [] if system is None else [system]
        got = []
        for message in messages:
            said.append(message)
            text = "".join(f"<user>{one}</user>" for one in said) + "<assistant>"
            ids = torch.tensor([tokenizer.encode(text).ids])
            made = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False
            )
            got.append(tokenizer.decode(made[0, ids.shape[1] :].tolist()))
            said.append(got[-1])
        return got

    return answers


def piped(package: Path, text: str, *options: str) -> Ran:
    return run_process("chat", package, *NEW, *options, stdin=text.encode())


def lines(*answers: str) -> str:
    return "".join(f"{answer}\n" for answer in answers)


def test_each_line_is_a_turn(tiny_package: Path, turns: Turns) -> None:
    ran = piped(tiny_package, "a\n\nb\n")
    assert (ran.code, ran.out) == (0, lines(*turns("a", "b")))
    first, second = ran.err.splitlines()
    assert SPEED.fullmatch(first)
    assert SPEED.fullmatch(second)


def test_a_last_line_without_an_end_and_lines_of_windows(tiny_package: Path, turns: Turns) -> None:
    assert piped(tiny_package, "a\r\nb").out == lines(*turns("a", "b"))
    assert piped(tiny_package, "") == Ran(0, "", "")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ('"""a\nb"""\n', "a\nb"),
        ('"""\na\n\nb\n"""\n', "a\n\nb"),
        ('"""a"""\n', "a"),
        ('  """a\n/b\n"""  \n', "a\n/b"),
        ("//a\n", "/a"),
        ('"""/help"""\n', "/help"),
    ],
)
def test_messages_of_several_lines(
    tiny_package: Path, turns: Turns, given: str, message: str
) -> None:
    assert piped(tiny_package, given).out == lines(*turns(message))


def test_a_system_message(tiny_package: Path, turns: Turns) -> None:
    expected = lines(*turns("a", system="S"))
    assert piped(tiny_package, "a\n", "--system", "S").out == expected
    assert piped(tiny_package, "/system S\na\n").out == expected
    assert expected != lines(*turns("a"))
    assert piped(tiny_package, "/system\na\n", "--system", "S").out == lines(*turns("a"))


def test_reset_keeps_the_system_message(tiny_package: Path, turns: Turns) -> None:
    once = turns("a", system="S")
    assert piped(tiny_package, "a\n/reset\na\n", "--system", "S").out == lines(*once, *once)


def test_save_and_load(tiny_package: Path, turns: Turns, tmp_path: Path) -> None:
    file = tmp_path / "a chat.json"
    one, two = turns("a", "b")
    ran = piped(tiny_package, f"a\n/save {file}\n/exit\nnever\n")
    assert (ran.code, ran.out) == (0, lines(one))
    assert ran.err.endswith(f"\nsaved in {file}\n")
    saved = json.loads(file.read_text(encoding="utf-8"))
    assert saved["messages"] == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": one},
    ]
    ran = piped(tiny_package, f"/load {file}\nb\n")
    assert (ran.code, ran.out) == (0, lines(two))
    assert ran.err.startswith(f"2 messages from {file}\n")


def test_help_tells_of_every_command(tiny_package: Path) -> None:
    ran = piped(tiny_package, "/help\n")
    for name in ("/system", "/reset", "/save", "/load", "/help", "/exit", '"""', "//", "Ctrl-C"):
        assert f"{name} " in ran.err
    assert (ran.code, ran.out) == (0, "")


COMMANDS = "/system, /reset, /save, /load, /help, /exit"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            b"/nope x\n",
            f"command; found /nope; allowed: {COMMANDS}; "
            "begin a message with // if its first character is /",
        ),
        (b"/save\n", "the command needs the name of a file"),
        (b"/load gone.json\n", "gone.json: cannot be read; found No such file or directory"),
        (b"a\xffb\n", "a line on standard input is not UTF-8; found byte 1"),
        (b'"""a\nb\n', 'a message that begins with """ does not end with """'),
        (b"x" * 80 + b"\n", "the prompt is longer than the context; found"),
    ],
)
def test_a_fault_ends_a_pipe(tiny_package: Path, given: bytes, said: str) -> None:
    ran = run_process("chat", tiny_package, *NEW, stdin=given)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"error: {said}")
    assert ran.err.count("\n") == 1


def test_a_field_that_makes_no_sense(tiny_package: Path) -> None:
    ran = piped(tiny_package, "a\n", "--top-p", "2")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: generation field 'top_p'; found 2.0")


# A terminal


class Keyboard:
    """Stands for the person at it: types lines, then Ctrl-D; an exception among them is raised."""

    def __init__(self, *typed: str | BaseException) -> None:
        self._typed: Iterator[str | BaseException] = iter((*typed, EOFError()))

    def __call__(self, sign: str = "") -> str:
        line = next(self._typed)
        if isinstance(line, BaseException):
            raise line
        return line


@pytest.fixture
def typing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def type_lines(*typed: str | BaseException) -> None:
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        monkeypatch.setattr(builtins, "input", Keyboard(*typed))

    return type_lines


def test_at_a_terminal_a_fault_is_told_and_the_next_message_asked_for(
    cli: Cli, typing: Callable[..., None], tiny_package: Path, turns: Turns
) -> None:
    typing("/nope", "a", KeyboardInterrupt(), "/load gone.json", '"""x', KeyboardInterrupt(), "b")
    ran = cli("chat", tiny_package, *NEW)
    assert (ran.code, ran.out) == (0, lines(*turns("a", "b")))
    head, *said = ran.err.splitlines()
    assert head == f"{tiny_package}, cpu; /help tells of commands"
    assert said[0].startswith(">>> error: command; found /nope; allowed: ")
    assert ">>> error: gone.json: cannot be read; found No such file or directory" in said
    assert ">>> ... " in said


def test_ctrl_c_stops_the_answer_and_not_the_program(
    cli: Cli,
    typing: Callable[..., None],
    tiny_package: Path,
    turns: Turns,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    typing("a", "/reset", "a")
    before = signal.getsignal(signal.SIGINT)
    write = sys.stdout.write
    pressed: list[str] = []

    def press_once(text: str) -> int:
        if not pressed:
            pressed.append(text)
            signal.raise_signal(signal.SIGINT)
        return write(text)

    monkeypatch.setattr(sys.stdout, "write", press_once)
    ran = cli("chat", tiny_package, *NEW)
    assert ran.code == 0
    stopped, whole = [match for line in ran.err.splitlines() if (match := SPEED.search(line))]
    assert (stopped[2], stopped[3]) == ("1", "cancelled")
    assert (whole[2], whole[3]) == ("4", "length")
    (answer,) = turns("a")
    assert ran.out.endswith(lines(answer))
    assert answer.startswith(ran.out.removesuffix(lines(answer)).rstrip("\n"))
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_real_terminal(tiny_package: Path, turns: Turns) -> None:
    """Signs, line editing (a typed letter is deleted again), Ctrl-C at the sign, and Ctrl-D."""
    import pty

    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "onnxlm", "chat", str(tiny_package), *NEW],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb"},
    )
    os.close(theirs)
    seen = read_until(ours, ">>> ")
    os.write(ours, b"ax\x7f\n")
    seen += read_until(ours, ">>> ")
    # A signal in the moment between the sign and the waiting for a key shows only with the next key.
    process.send_signal(signal.SIGINT)
    while not readable(ours, 2):
        process.send_signal(signal.SIGINT)
    read_until(ours, ">>> ")
    os.write(ours, b"\x04")
    assert process.wait(30) == 0
    os.close(ours)
    said = process.communicate()[1].decode()
    (answer,) = turns("a")
    assert answer.replace("\n", "\r\n") in seen
    assert SPEED.search(said)


def readable(terminal: int, seconds: float) -> bool:
    """Whether something comes within that time."""
    return bool(select.select([terminal], [], [], seconds)[0])


def read_until(terminal: int, sign: str) -> str:
    """What the terminal shows up to a sign at the end."""
    seen = b""
    while not seen.endswith(sign.encode()):
        assert readable(terminal, 60), seen
        seen += os.read(terminal, 1024)
    return seen.decode(errors="replace")


def test_help(cli: Cli) -> None:
    """The sampling options are those of `generate`."""

    def options(command: str) -> set[str]:
        return set(re.findall(r"--[a-z-]+", cli(command, "--help").out))

    assert options("generate") - {"--chat", "--json", "--ids"} <= options("chat")
    assert "--system" in options("chat")
