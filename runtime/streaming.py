"""Text from tokens that arrive one at a time; the pieces put together are the one-shot decode.

A token has no text of its own: it may hold half a character, and a leading space may be dropped at the
start of a text only. Rather than decode a window of tokens again at each step, the parts of a tokenizer's
decoder are run as a chain of small stages that pass on what no later token can change. Work per token is
bounded by the token itself.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tokenizers import Regex, decoders

from onnxlm.runtime.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


class TextStream:
    """Turns token ids, one at a time, into text that can be shown at once.

    The texts returned by `push` and the last one by `finish` concatenate to
    `tokenizer.decode(all ids, skip_special_tokens)`, whatever the ids are. Bytes of an unfinished character
    are held; those still unfinished at the end come out of `finish` as U+FFFD, as they do in the
    one-shot decode, never as an exception.

    A tokenizer that spells unknown characters as byte tokens (`<0xE4>`) decides over a whole run of
    them: one invalid byte makes every byte of the run U+FFFD. Such a run is held until another token
    ends it.

    Args:
        tokenizer: Where the ids come from.
        skip_special_tokens: Leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stages = _stages(tokenizer.decoder)

    def push(self, token_id: int) -> str:
        """Text that became certain with this token; often empty in the middle of a character.

        Raises:
            InputError: The id is negative or not below the vocabulary's size.
        """
        piece = self._tokenizer.piece(token_id, self._skip_special_tokens)
        if piece is None:
            return ""
        pieces = [piece]
        for stage in self._stages:
            pieces = _fed(stage, pieces)
        return "".join(pieces)

    def finish(self) -> str:
        """The text still held, after the last token."""
        pieces: list[str] = []
        for stage in self._stages:
            pieces = _fed(stage, pieces) + stage.finish()
        return "".join(pieces)


class _Stage(Protocol):
    """One part of a decoder: takes pieces in order, gives pieces in order."""

    def feed(self, piece: str) -> list[str]: ...

    def finish(self) -> list[str]: ...


def _fed(stage: _Stage, pieces: Sequence[str]) -> list[str]:
    return [out for piece in pieces for out in stage.feed(piece)]


class _EachPiece:
    """Pieces change one by one; the first may change otherwise than the rest."""

    def __init__(self, first: Callable[[str], str], rest: Callable[[str], str]) -> None:
        self._change = first
        self._rest = rest

    def feed(self, piece: str) -> list[str]:
        change, self._change = self._change, self._rest
        return [change(piece)]

    def finish(self) -> list[str]:
        return []


class _LastPieceDiffers:
    """The last piece changes otherwise than the rest: each waits for the next."""

    def __init__(self, change: Callable[[str], str], last: Callable[[str], str]) -> None:
        self._change = change
        self._last = last
        self._held: list[str] = []

    def feed(self, piece: str) -> list[str]:
        out = [self._change(held) for held in self._held]
        self._held = [piece]
        return out

    def finish(self) -> list[str]:
        return [self._last(held) for held in self._held]


class _Utf8Bytes:
    """Pieces spell bytes, one character a byte; the bytes of all pieces are one UTF-8 text."""

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def feed(self, piece: str) -> list[str]:
        try:
            data = bytes([_BYTE_OF_CHARACTER[character] for character in piece])
        except KeyError:  # an added token is its own text
            data = piece.encode()
        return [self._decode(data)]

    def finish(self) -> list[str]:
        return [self._decode(b"", final=True)]


class _ByteFallback:
    """Pieces like <0xE4> are bytes; a run of them is one UTF-8 text, or U+FFFD for each byte."""

    def __init__(self) -> None:
        self._run = bytearray()

    def feed(self, piece: str) -> list[str]:
        if match := _BYTE_PIECE.fullmatch(piece):
            self._run.append(int(match[1], 16))
            return []
        return [*self.finish(), piece]

    def finish(self) -> list[str]:
        run, self._run = self._run, bytearray()
        if not run:
            return []
        try:
            return [run.decode()]
        except UnicodeDecodeError:
            return [REPLACEMENT] * len(run)


class _StripStart:
    """Drops up to `count` leading characters `content` of the whole text."""

    def __init__(self, content: str, count: int) -> None:
        self._content = content
        self._left = count

    def feed(self, piece: str) -> list[str]:
        start = 0
        while start < len(piece) and self._left:
            if piece[start] == self._content:
                start += 1
                self._left -= 1
            else:
                self._left = 0
        return [piece[start:]]

    def finish(self) -> list[str]:
        return []


class _WholeText:
    """For a decoder that looks further than a stream can: all text comes at the end."""

    def __init__(self, decoder: decoders.Decoder) -> None:
        self._decoder = decoder
        self._pieces: list[str] = []

    def feed(self, piece: str) -> list[str]:
        self._pieces.append(piece)
        return []

    def finish(self) -> list[str]:
        return [self._decoder.decode(self._pieces)]


# One object of tokenizer.json's "decoder", and what makes its stage.
_Part = Mapping[str, Any]
_Builder = Callable[[_Part], _Stage]


def _stages(decoder: decoders.Decoder | None) -> list[_Stage]:
    """The chain that does what `decoder` does."""
    if decoder is None:
        return [_EachPiece(lambda piece: piece, lambda piece: " " + piece)]
    # The state is the "decoder" object of tokenizer.json.
    parts = _flat(json.loads(decoder.__getstate__()))
    stages: list[_Stage] = []
    whole = False  # whether the text is one piece already, of which the stages see parts
    for part in parts:
        kind = part["type"]
        if kind == "Fuse":
            whole = True
            continue
        build = _text_stage(part) if whole else _PIECE_STAGES.get(kind)
        if build is None:
            return [_WholeText(decoder)]
        stages.append(build(part))
        whole = whole or kind == "ByteLevel"
    return stages


def _flat(part: _Part) -> list[_Part]:
    if part["type"] != "Sequence":
        return [part]
    return [inner for outer in part["decoders"] for inner in _flat(outer)]


def _text_stage(part: _Part) -> _Builder | None:
    """How to build a part that sees the whole text as one piece; None where parts of it will not do."""
    match part:
        case {"type": "Replace", "pattern": {"String": pattern}} if len(pattern) == 1:
            return _replace
        case {"type": "Strip", "stop": 0}:
            return lambda strip: _StripStart(strip["content"], strip["start"])
    return None


def _alike(decoder: decoders.Decoder) -> _Stage:
    """A stage for a decoder that treats every piece alike."""
    return _EachPiece(lambda piece: decoder.decode([piece]), lambda piece: decoder.decode([piece]))


def _first_differs(decoder: decoders.Decoder) -> _Stage:
    """A stage for a decoder that treats the first piece otherwise; "a" stands for the pieces before."""
    return _EachPiece(
        lambda piece: decoder.decode([piece]), lambda piece: decoder.decode(["a", piece])[1:]
    )


def _replace(part: _Part) -> _Stage:
    (kind, pattern), *_ = part["pattern"].items()
    return _alike(decoders.Replace(Regex(pattern) if kind == "Regex" else pattern, part["content"]))


def _bpe(part: _Part) -> _Stage:
    decoder = decoders.BPEDecoder(part["suffix"])
    return _LastPieceDiffers(
        lambda piece: decoder.decode([piece, ""]), lambda piece: decoder.decode([piece])
    )


# Parts that see separate pieces.
_PIECE_STAGES: Mapping[str, _Builder] = {
    "ByteLevel": lambda part: _Utf8Bytes(),
    "ByteFallback": lambda part: _ByteFallback(),
    "Replace": _replace,
    "Strip": lambda part: _alike(decoders.Strip(part["content"], part["start"], part["stop"])),
    "Metaspace": lambda part: _first_differs(
        decoders.Metaspace(part["replacement"], part["prepend_scheme"], part["split"])
    ),
    "WordPiece": lambda part: _first_differs(decoders.WordPiece(part["prefix"], part["cleanup"])),
    "BPEDecoder": _bpe,
}


def _byte_of_character() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the others for 256 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()
_BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")
