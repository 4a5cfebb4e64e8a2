"""Text to token ids and back, from the tokenizer files of a package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers.decoders import Decoder

from onnxlm.errors import InputError, PackageError
from onnxlm.strict_json import load_object

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"

# The named special tokens of a Hugging Face tokenizer_config.json, also the variables of a chat template.
SPECIAL_TOKEN_KEYS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def check_token_ids(ids: Sequence[int] | NDArray[Any], vocab_size: int) -> NDArray[np.int64]:
    """The ids of one row, each known to be a row of the embedding table.

    ONNX Runtime's Gather takes -1 as the last row without complaint, so the bounds are held here.

    Args:
        ids: Token ids of one row, [sequence_length].
        vocab_size: Rows of the embedding table.

    Returns:
        int64 [sequence_length].

    Raises:
        InputError: An id is no integer, negative, or not below vocab_size; position and value are named.
    """
    try:
        array = np.asarray(ids)
    except ValueError:  # lists of different lengths
        array = np.asarray(ids, dtype=object)
    if array.shape == (0,):
        return np.zeros(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputError(
            "token ids of a row",
            found=f"{array.dtype} of shape {list(array.shape)}",
            allowed="a flat list of integers",
        )
    outside = (array < 0) | (array >= vocab_size)
    if outside.any():
        position = int(outside.argmax())
        raise InputError(
            f"token id at position {position} is outside the vocabulary",
            found=int(array[position]),
            allowed=f"0 to {vocab_size - 1}",
        )
    return array.astype(np.int64)


class Tokenizer:
    """A `tokenizers` tokenizer with the special tokens of its tokenizer_config.json.

    Args:
        backend: The tokenizer of a tokenizer.json; truncation and padding are switched off.
        config: The parsed tokenizer_config.json; may be empty.
        vocab_size: Rows of the model's embedding table; by default one more than the highest id.

    Attributes:
        has_text: Whether there is a vocabulary; without one, ids have no text and no text has ids.
        vocab_size: Ids at or above it are refused, in both directions.
        special_tokens: The text of each special token that the config names, by its key ("bos_token").
        bos_token_id: None where the config names none or the vocabulary lacks it; so for the next two.
        eos_token_id: The token that ends a text.
        pad_token_id: The token that fills a batch.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, Any],
        vocab_size: int | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = special_tokens(config)
        _mark_special(backend, self.special_tokens)
        self.has_text = backend.get_vocab_size() > 0
        self.vocab_size = vocab_size or max(backend.get_vocab().values(), default=-1) + 1
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        self.pad_token_id = self._special_id("pad_token")
        self._special_texts = frozenset(
            token.content for token in backend.get_added_tokens_decoder().values() if token.special
        )
        self._before, self._behind = _added_around(backend)
        # A flag can only add to what the post-processor of tokenizer.json adds, never a second time.
        bos = self.bos_token_id if config.get("add_bos_token") is True else None
        eos = self.eos_token_id if config.get("add_eos_token") is True else None
        if bos is not None and self._before[:1] != [bos]:
            self._before = [bos, *self._before]
        if eos is not None and self._behind[-1:] != [eos]:
            self._behind = [*self._behind, eos]

    @classmethod
    def from_folder(cls, path: str | Path, vocab_size: int | None = None) -> Tokenizer:
        """The tokenizer of a package or a Hugging Face folder.

        Args:
            path: Folder with tokenizer.json and, as a rule, tokenizer_config.json.
            vocab_size: Rows of the model's embedding table; by default one more than the highest id.

        Raises:
            PackageError: tokenizer.json is missing, or one of the files is damaged.
        """
        file = Path(path) / TOKENIZER_FILE
        if not file.is_file():
            raise PackageError(f"{file} is missing", fix=f"put the model's {TOKENIZER_FILE} there")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise PackageError(
                f"{file} is not a tokenizer that can be read", found=error
            ) from error
        return cls(backend, read_tokenizer_config(path), vocab_size)

    @classmethod
    def of_package(cls, path: str | Path, vocab_size: int) -> Tokenizer:
        """As `from_folder`; where there is no tokenizer.json, one without a vocabulary."""
        if (Path(path) / TOKENIZER_FILE).is_file():
            return cls.from_folder(path, vocab_size)
        return cls(tokenizers.Tokenizer(tokenizers.models.WordLevel({})), {}, vocab_size)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Special tokens written out in the text become their ids. A text that already begins with the
        BOS token (a rendered chat) gets no second one.

        Args:
            text: Any text; may be empty.
            add_special_tokens: Add what tokenizer.json's post-processor or the config's add_bos_token
                and add_eos_token ask for.

        Raises:
            InputError: The text is no valid Unicode, cannot be spelled in the vocabulary, or has a token
                outside the model's vocabulary; or there is no vocabulary.
        """
        self._require_text()
        try:
            text.encode()
            ids = list(self._backend.encode(text, add_special_tokens=False).ids)
        except UnicodeEncodeError as error:  # half of a surrogate pair
            raise InputError("a prompt is no valid Unicode text", found=ascii(text)[:80]) from error
        except Exception as error:  # the library raises bare Exception
            raise InputError(
                f"the tokenizer cannot encode the text: {error}", found=ascii(text)[:80]
            ) from error
        if add_special_tokens:
            before = self._before
            if ids[:1] == [self.bos_token_id] and before[-1:] == ids[:1]:
                before = before[:-1]
            ids = before + ids + self._behind
        check_token_ids(ids, self.vocab_size)
        return ids

    def decode(self, ids: Sequence[int] | NDArray[Any], skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that form no UTF-8 become U+FFFD.

        Ids that the model's table has but the tokenizer lacks (padding of the table) have no text.

        Raises:
            InputError: An id is negative or not below vocab_size, or there is no vocabulary.
        """
        self._require_text()
        checked = check_token_ids(ids, self.vocab_size).tolist()
        return str(self._backend.decode(checked, skip_special_tokens=skip_special_tokens))

    def piece(self, token_id: int, skip_special_tokens: bool = True) -> str | None:
        """The vocabulary's spelling of a token before any decoding; None when it adds no text.

        Raises:
            InputError: The id is negative or not below vocab_size.
        """
        if not 0 <= token_id < self.vocab_size:
            check_token_ids([token_id], self.vocab_size)
        token: str | None = self._backend.id_to_token(token_id)
        if skip_special_tokens and token in self._special_texts:
            return None
        return token

    @property
    def decoder(self) -> Decoder | None:
        """What turns pieces into text; None joins them with spaces."""
        decoder: Decoder | None = self._backend.decoder
        return decoder

    def _require_text(self) -> None:
        if not self.has_text:
            raise no_text()

    def _special_id(self, key: str) -> int | None:
        text = self.special_tokens.get(key)
        return None if text is None else self._backend.token_to_id(text)


def no_text() -> InputError:
    """The error of who asks for text where there is no vocabulary."""
    return InputError(
        f"the package has no {TOKENIZER_FILE}: its tokens have no text",
        fix="give token ids (--ids) and read token_ids, or export again with the tokenizer's file",
    )


def read_tokenizer_config(path: str | Path) -> dict[str, Any]:
    """The parsed tokenizer_config.json of a folder; empty when there is none.

    Raises:
        PackageError: The file is no JSON object.
    """
    file = Path(path) / TOKENIZER_CONFIG_FILE
    return load_object(file, lenient=True) if file.is_file() else {}


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Text of the named special tokens; each is spelled as a string or as an object with "content"."""
    texts = {}
    for key in SPECIAL_TOKEN_KEYS:
        value = config.get(key)
        if isinstance(value, Mapping):
            value = value.get("content")
        if value is None:
            continue
        if not isinstance(value, str):
            raise PackageError(
                f"{TOKENIZER_CONFIG_FILE}: field '{key}'",
                found=repr(value),
                allowed="a string, an object with 'content', or null",
            )
        texts[key] = value
    return texts


def _mark_special(backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]) -> None:
    """Let a named special token that is a plain vocabulary entry be skipped and matched like the others."""
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    plain = [
        text
        for text in special_tokens.values()
        if text not in added and backend.token_to_id(text) is not None
    ]
    if plain:
        backend.add_special_tokens(plain)


def _added_around(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """Ids that the post-processor puts before and behind a text, seen on a text of ordinary tokens."""
    text = "a"
    if not _ids(backend, text):  # a vocabulary without that letter
        added = _ids(backend, "", add_special_tokens=True)
        entries = backend.get_vocab(with_added_tokens=False).items()
        text = next(
            (t for t, token_id in entries if token_id not in added and _ids(backend, t)), ""
        )
    bare, full = _ids(backend, text), _ids(backend, text, add_special_tokens=True)
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    raise PackageError(
        f"{TOKENIZER_FILE}: the post-processor changes the tokens of the text", found=full
    )


def _ids(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
    """Ids of a text; none where the vocabulary cannot spell it."""
    try:
        return list(backend.encode(text, add_special_tokens=add_special_tokens).ids)
    except Exception:  # the library raises bare Exception
        return []
