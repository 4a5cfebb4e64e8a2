"""A package ready to generate: text or ids in, text and ids out."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from onnxlm import io_spec
from onnxlm.errors import InputError
from onnxlm.package import Package, open_package
from onnxlm.runtime.chat import Chat, ChatSettings
from onnxlm.runtime.engine import PREFILL_CHUNK, Batch, Floats, PromptCancelledError, Sessions
from onnxlm.runtime.generate import Timings, token_steps
from onnxlm.runtime.prefix_cache import PrefixCache
from onnxlm.runtime.prepacked import PreparedGraphs, open_files, open_graphs, own_files
from onnxlm.runtime.providers import find_provider
from onnxlm.runtime.sampling_params import SamplingParams
from onnxlm.runtime.session import SessionConfig, provider_in_use
from onnxlm.runtime.stopping import RowStops, StopReason, read_eos_token_ids
from onnxlm.runtime.streaming import TextStream
from onnxlm.runtime.text_iterator import AsyncTextIterator, TextIterator
from onnxlm.runtime.tokenizer import Tokenizer, check_token_ids

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Generation:
    """What came of one prompt.

    Attributes:
        text: The new text, special tokens left out.
        token_ids: The new ids, an end-of-text token included.
        finish_reason: Why it ended; None while it runs.
        prompt_tokens: Tokens that ran before the first new one.
        ttft_s: Seconds to the first token.
        decode_tokens_per_s: New tokens after the first, all rows together, by the seconds they took.
    """

    text: str
    token_ids: list[int]
    finish_reason: StopReason | None
    prompt_tokens: int
    ttft_s: float
    decode_tokens_per_s: float


class LanguageModel:
    """Sessions, tokenizer and settings of one package.

    Args:
        package: An opened package.
        sessions: Its sessions.
        tokenizer: Its tokenizer.
        fallback: See the attribute.

    Attributes:
        provider: The execution provider that the sessions really use, by its name in `runtime/providers/`.
        fallback: Why it is not the one that was asked for; None when it is.
        eos_token_ids: Ids that end a text.
        defaults: What the package recommends where a caller does not ask for anything.
        prefixes: How chats that share a prefix begin; empty until one does.
    """

    def __init__(
        self,
        package: Package,
        sessions: Sessions,
        tokenizer: Tokenizer,
        fallback: str | None = None,
    ) -> None:
        self.package = package
        self.sessions = sessions
        self.tokenizer = tokenizer
        self.provider = provider_in_use(sessions.decode)
        self.fallback = fallback
        self.prefixes = PrefixCache(sessions)
        self.eos_token_ids = read_eos_token_ids(package.path, tokenizer)
        has_defaults = package.has("generation_config.json")
        raw = package.read_json("generation_config.json") if has_defaults else {}
        self.defaults = SamplingParams.from_generation_config(raw)

    @overload
    def generate(self, prompts: str, **fields: Any) -> Generation: ...
    @overload
    def generate(self, prompts: Sequence[Prompt], **fields: Any) -> list[Generation]: ...
    def generate(
        self, prompts: str | Sequence[Prompt], **fields: Any
    ) -> Generation | list[Generation]:
        """Continue one prompt or a batch of prompts of any lengths.

        Args:
            prompts: A text, or a list of texts or of lists of token ids.
            **fields: Settings by the names of generation_config.json, see `SamplingParams`; what is not
                given is as the package recommends.

        Raises:
            InputError: A prompt is empty, too long, or has ids out of bounds; a field makes no sense.
        """
        batch = [prompts] if isinstance(prompts, str) else list(prompts)
        rows = [self.encode(prompt) for prompt in batch]
        run = _Run(self, Batch(self.sessions, len(rows)), rows, self.sampling_params(fields))
        for _ in run.steps():
            pass
        results = [run.result(row) for row in range(len(rows))]
        return results[0] if isinstance(prompts, str) else results

    def stream(self, prompt: Prompt, **fields: Any) -> TextIterator:
        """Continue one prompt, piece by piece as the text becomes certain; fields as in `generate`."""
        ids, params = self.encode(prompt), self.sampling_params(fields)
        return self.stream_after(Batch(self.sessions, 1), ids, params)

    def astream(self, prompt: Prompt, **fields: Any) -> AsyncTextIterator:
        """As `stream`, for `async for`: the steps run in a worker thread, and end when the loop is left."""
        return AsyncTextIterator(self.stream(prompt, **fields))

    def stream_after(
        self, batch: Batch, ids: Sequence[int], params: SamplingParams
    ) -> TextIterator:
        """Continue what `batch` (of one row) holds with new tokens `ids`."""
        run = _Run(self, batch, [list(ids)], params)
        return TextIterator(run.text(0), lambda: run.result(0), run.cancelled)

    def chat(
        self, system: str | None = None, *, share_prefix: bool = False, **settings: Any
    ) -> Chat:
        """Begin a conversation, whose turns share one cache.

        Args:
            system: A first message of role "system"; none when None.
            share_prefix: Run the system message once for all chats that begin with it.
            **settings: Fields of `ChatSettings`: tools, documents, name, variables.

        Raises:
            InputError: The package has no chat template.
        """
        return Chat(self, system, share_prefix=share_prefix, settings=ChatSettings(**settings))

    def load_chat(self, path: str | Path) -> Chat:
        """A conversation that `Chat.save` wrote; its tokens are run again.

        Raises:
            InputError, PackageError: The file is no saved chat, or holds tokens that the model has not.
        """
        return Chat.load(self, path)

    def logits(self, token_ids: Sequence[int]) -> Floats:
        """Logits behind every position of one row, float32 [sequence_length, vocab_size].

        Raises:
            InputError: The row is empty, too long, or has ids out of bounds.
        """
        ids, batch = self.encode(token_ids), Batch(self.sessions, 1)
        chunks = [ids[i : i + PREFILL_CHUNK] for i in range(0, len(ids), PREFILL_CHUNK)]
        parts = [batch.prefill_all_logits(chunk) for chunk in chunks]
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def encode(self, prompt: Prompt, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt.

        Args:
            prompt: A text, or token ids, which are only checked.
            add_special_tokens: Add those that the tokenizer begins and ends a text with.

        Raises:
            InputError: There is no token, there are more than the context holds, or one is out of bounds.
        """
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt, add_special_tokens)
        else:
            ids = check_token_ids(prompt, self.sessions.vocab_size).tolist()
        if not ids:
            raise InputError("the prompt is empty", fix="give at least one token")
        room = self.sessions.context_length
        if len(ids) > room:
            raise InputError(
                "the prompt is longer than the context",
                found=f"{len(ids)} tokens",
                allowed=f"up to {room}",
                fix="shorten it",
            )
        return ids

    def sampling_params(self, fields: Mapping[str, Any]) -> SamplingParams:
        """The package's settings with what a caller asked for.

        Raises:
            InputError: A field is unknown or out of its bounds.
        """
        return self.defaults.with_overrides(fields)


class _Run:
    """One generation of a batch, from prompts to results.

    Attributes:
        cancelled: Once set, by any thread, no step runs any more.
    """

    def __init__(
        self,
        model: LanguageModel,
        batch: Batch,
        rows: list[list[int]],
        params: SamplingParams,
    ) -> None:
        context = model.sessions.context_length
        room = [
            context - int(held) - len(row) for held, row in zip(batch.lengths, rows, strict=True)
        ]
        self.cancelled = batch.cancelled = threading.Event()
        self._stops = RowStops(model.eos_token_ids, params.max_new_tokens, room)
        self._timings = Timings()
        self._ids: list[list[int]] = [[] for _ in rows]
        self._prompts = rows
        self._tokenizer = model.tokenizer
        self._steps = token_steps(batch, rows, params, self._stops, self._timings)

    def steps(self) -> Iterator[None]:
        """Advance token by token."""
        while not self.cancelled.is_set():
            try:
                tokens, live = next(self._steps)
            except (StopIteration, PromptCancelledError):
                return
            for row in np.flatnonzero(live):
                self._ids[row].append(int(tokens[row]))
            yield

    def text(self, row: int) -> Generator[str, None, None]:
        """Advance, giving one row's text as it becomes certain."""
        stream = TextStream(self._tokenizer)
        for _ in self.steps():
            piece = stream.push(self._ids[row][-1])
            if piece:
                yield piece
        rest = stream.finish()
        if rest:
            yield rest

    def result(self, row: int) -> Generation:
        """What a row has come to."""
        ids, spent = self._ids[row], sum(self._timings.steps_s)
        made = sum(len(other) for other in self._ids) - len(self._ids)
        return Generation(
            text=self._tokenizer.decode(ids),
            token_ids=ids,
            finish_reason=self._stops.reasons[row]
            or ("cancelled" if self.cancelled.is_set() else None),
            prompt_tokens=len(self._prompts[row]),
            ttft_s=self._timings.ttft_s,
            decode_tokens_per_s=made / spent if spent else 0.0,
        )


def load(
    path: str | Path,
    provider: str = "cpu",
    *,
    verify: str = "auto",
    packed: bool = True,
    **session: Any,
) -> LanguageModel:
    """Open a package for generation.

    Args:
        path: Folder of the package.
        provider: Execution provider, a file name in `runtime/providers/`.
        verify: When files are hashed, see `open_package`.
        packed: Keep the weights, packed for this machine, in the user's cache: made once, then mapped by all
            sessions. Otherwise every session packs its own copy.
        **session: More fields of `SessionConfig`: device_id, threads, allow_fallback, options.

    Raises:
        PackageError: The package is damaged.
        ProviderError: The provider is not known or not available.
    """
    config = SessionConfig(provider=provider, **session)
    asked = find_provider(provider)
    package = open_package(path, verify)
    manifest = package.manifest
    if packed:
        opened, _ = open_graphs(package, config)
    else:
        opened = open_files(PreparedGraphs(own_files(package), cached=False), config)
    prefill, decode = opened[io_spec.PREFILL], opened[io_spec.DECODE]
    used = provider_in_use(decode)
    fallback = None
    if used != provider:
        fallback = asked.unavailable() or f"onnxruntime could not open it on {asked.ort_name}"
    device = find_provider(used).device
    sessions = Sessions(
        prefill=prefill,
        decode=decode,
        states=manifest.states,
        vocab_size=manifest.vocab_size,
        context_length=manifest.context_length,
        device=(device, 0 if device == "cpu" else config.device_id),
    )
    tokenizer = Tokenizer.from_folder(path, manifest.vocab_size)
    return LanguageModel(package, sessions, tokenizer, fallback)
