"""The two tokenizer models of GGUF files of language models: byte-level BPE and SentencePiece BPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers

from onnxlm.errors import CheckpointError
from onnxlm.models.checkpoint.gguf_splitters import SPLITTERS

_MARK = "\u2581"  # SentencePiece's visible space


class Vocabulary:
    """The `tokenizer.ggml.*` metadata of a file.

    Args:
        fields: Metadata by key without that prefix.
        source: The file, for messages.
    """

    def __init__(self, fields: Mapping[str, Any], source: str) -> None:
        self._fields = fields
        self._source = source
        self.tokens: list[str] = self.field("tokens")
        self.types: list[int] = fields.get("token_type", [1] * len(self.tokens))
        self.same_length("token_type", self.types)

    def field(self, key: str) -> Any:
        """A required field."""
        if key not in self._fields:
            raise CheckpointError(f"{self._source}: metadata key tokenizer.ggml.{key} is missing")
        return self._fields[key]

    def get(self, key: str, default: Any = None) -> Any:
        """An optional field."""
        return self._fields.get(key, default)

    def token_id(self, key: str) -> int | None:
        """An optional token id, checked."""
        value = self._fields.get(key)
        if value is not None and not 0 <= value < len(self.tokens):
            raise CheckpointError(
                f"{self._source}: tokenizer.ggml.{key} is outside the vocabulary",
                found=value,
                allowed=f"0 to {len(self.tokens) - 1}",
            )
        return value

    def fits(self, rows: int) -> None:
        """Refuse more tokens than the embedding table has rows."""
        if len(self.tokens) > rows:
            raise CheckpointError(
                f"{self._source}: the tokenizer has more tokens than the embedding has rows",
                found=len(self.tokens),
                allowed=f"at most {rows}",
            )

    def same_length(self, key: str, values: list[Any]) -> None:
        """Refuse a list that does not have an entry a token."""
        if len(values) != len(self.tokens):
            raise CheckpointError(
                f"{self._source}: tokenizer.ggml.{key} does not fit the tokens",
                found=f"{len(values)} entries",
                allowed=len(self.tokens),
            )

    def merges(self) -> list[tuple[str, str]]:
        """BPE merges by rank; a token may hold no space, so the one space separates."""
        pairs = [tuple(merge.split(" ")) for merge in self.field("merges")]
        known = set(self.tokens)
        merges: list[tuple[str, str]] = []
        for pair in pairs:
            if len(pair) != 2 or not known.issuperset((*pair, "".join(pair))):
                raise CheckpointError(
                    f"{self._source}: tokenizer.ggml.merges joins what is no token",
                    found=repr(" ".join(pair)),
                )
            merges.append((pair[0], pair[1]))
        return merges

    def unsupported(self, key: str, allowed: Mapping[str, Any]) -> CheckpointError:
        """The error for a field whose value is not among the allowed ones."""
        return CheckpointError(
            f"{self._source}: tokenizer.ggml.{key} is not supported",
            found=repr(self._fields.get(key)),
            allowed=", ".join(sorted(allowed)),
        )


# Of Llama 3's tokenizer: a word that is a token is not merged, and a text starts with bos.
LLAMA3_SPLITTERS = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3"})
_COMPOSED = frozenset({"qwen2", "deepseek-r1-qwen"})


def byte_level_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """GPT-2's byte-level BPE with the splitter that `tokenizer.ggml.pre` names."""
    splitter = vocabulary.get("pre")
    if splitter not in SPLITTERS:
        raise vocabulary.unsupported("pre", SPLITTERS)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(vocabulary.tokens)},
            merges=vocabulary.merges(),
            ignore_merges=splitter in LLAMA3_SPLITTERS,
        )
    )
    if splitter in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = SPLITTERS[splitter]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """SentencePiece BPE with byte fallback, its merges derived from the pieces' scores."""
    scores = vocabulary.field("scores")
    vocabulary.same_length("scores", scores)
    unknown = vocabulary.token_id("unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(vocabulary.tokens)},
            merges=_merges_by_score(vocabulary.tokens, scores),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = vocabulary.get("add_space_prefix", True)
    replace = normalizers.Replace(" ", _MARK)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_MARK), replace]) if prefixed else replace
    )
    steps = [decoders.Replace(_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixed:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_by_score(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, best-scored third first.

    SentencePiece joins the adjacent pair whose piece scores best; ranks by that score do the same.
    """
    ids = {token: index for index, token in enumerate(tokens)}
    merges = []
    for token, index in ids.items():
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                merges.append((-scores[index], left, right))
    return [(tokens[left], tokens[right]) for _, left, right in sorted(merges)]
