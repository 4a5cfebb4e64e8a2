"""A package ready to generate: text or ids in, text and ids out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, cast, overload

import numpy as np

from onnxlm.errors import InputError
from onnxlm.package import Package, open_package
from onnxlm.progress import Progress, silent
from onnxlm.runtime.arrays import Floats
from onnxlm.runtime.beam_run import BeamRun
from onnxlm.runtime.chat import Chat, ChatSettings
from onnxlm.runtime.draft_policy import StepCosts
from onnxlm.runtime.engine import Batch
from onnxlm.runtime.generation import Generation
from onnxlm.runtime.memory_budget import read_bytes
from onnxlm.runtime.memory_release import release_heap
from onnxlm.runtime.opening import open_sessions
from onnxlm.runtime.prefix_cache import PrefixCache
from onnxlm.runtime.sampling_params import SamplingParams, params_of_rows
from onnxlm.runtime.sampling_run import Prompts, Run, SamplingRun
from onnxlm.runtime.session import SessionConfig, provider_in_use
from onnxlm.runtime.sessions import Sessions
from onnxlm.runtime.stopping import read_eos_token_ids
from onnxlm.runtime.text_iterator import AsyncTextIterator, TextIterator
from onnxlm.runtime.tokenizer import TOKENIZER_FILE, Tokenizer, check_token_ids

Prompt = str | Sequence[int]


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
        progress: Told how much of a prompt of several chunks has run; silent until one is assigned.
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
        self.progress: Progress = silent
        self._costs = StepCosts()
        self.eos_token_ids = read_eos_token_ids(package.path, tokenizer)
        has_defaults = package.has("generation_config.json")
        raw = package.read_json("generation_config.json") if has_defaults else {}
        self.defaults = SamplingParams.from_generation_config(raw)

    @overload
    def generate(self, prompts: Prompt, **fields: Any) -> Generation: ...
    @overload
    def generate(self, prompts: Sequence[Prompt], **fields: Any) -> list[Generation]: ...
    def generate(
        self, prompts: Prompt | Sequence[Prompt], **fields: Any
    ) -> Generation | list[Generation]:
        """Continue one prompt or a batch of prompts of any lengths.

        Args:
            prompts: A text or a list of token ids, or a list of such.
            **fields: Settings by the names of generation_config.json, see `SamplingParams`; what is not
                given is as the package recommends. A list gives a value for each prompt.

        Raises:
            InputError: A prompt is empty, too long, or has ids out of bounds; a field makes no sense.
        """
        one = _is_one(prompts)
        batch = [prompts] if one else list(prompts)
        rows = [self.encode(cast(Prompt, prompt)) for prompt in batch]
        params = params_of_rows(self.defaults, fields, len(rows))
        run = self._begin(Batch(self.sessions, len(rows)), rows, params)
        for _ in run.steps():
            pass
        results = [run.result(row) for row in range(len(rows))]
        return results[0] if one else results

    def stream(self, prompt: Prompt, **fields: Any) -> TextIterator:
        """Continue one prompt, piece by piece as the text becomes certain; fields as in `generate`."""
        ids, params = self.encode(prompt), self.sampling_params(fields)
        return self.stream_after(Batch(self.sessions, 1), ids, params)

    def astream(self, prompt: Prompt, **fields: Any) -> AsyncTextIterator:
        """As `stream`, for `async for`: the steps run in a worker thread, and end when the loop is left."""
        return AsyncTextIterator(self.stream(prompt, **fields))

    def stream_after(
        self,
        batch: Batch,
        ids: Sequence[int],
        params: SamplingParams,
        held: Sequence[int] = (),
        begun: Sequence[int] = (),
    ) -> TextIterator:
        """Continue what `batch` (of one row) holds, the tokens `held`, with new tokens `ids`.

        The last of all these, `begun`, are one text with what comes; a new text begins where there are none.
        """
        run = self._begin(batch, [list(ids)], [params], [list(held)], [list(begun)])
        return TextIterator(run.text(), lambda: run.result(0), run.cancelled)

    def _begin(
        self,
        batch: Batch,
        rows: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        held: Sequence[Sequence[int]] = (),
        begun: Sequence[Sequence[int]] = (),
    ) -> Run:
        if any(one.prompt_lookup_num_tokens is not None for one in params):
            self._check_shared_weights()
        if not self.tokenizer.has_text and any(one.stop_strings for one in params):
            raise InputError(
                f"stop_strings: the package has no {TOKENIZER_FILE}", fix="give stop_token_ids"
            )
        batch.progress = self.progress
        prompts = Prompts(
            batch=batch,
            rows=rows,
            params=params,
            eos=self.eos_token_ids,
            context_length=self.sessions.context_length,
            vocab_size=self.sessions.vocab_size,
            tokenizer=self.tokenizer,
            held=held,
            begun=begun,
            costs=self._costs,
        )
        beams = any(one.num_beams > 1 for one in params)
        return BeamRun(prompts) if beams else SamplingRun(prompts)

    def _check_shared_weights(self) -> None:
        """Guesses are looked at by the prefill graph, whose logits must be those of the decode graph."""
        made = self.package.manifest.quantization
        if made is not None and made.prefill_weights != "shared":
            raise InputError(
                "prompt_lookup_num_tokens: prefill and decode compute with different weights here",
                found=f"prefill weights {made.prefill_weights}",
                allowed="shared",
                fix="leave it out, or quantize without --prefill-rows",
            )

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
        logits = np.empty((len(ids), self.sessions.vocab_size), dtype=np.float32)
        start = 0
        while start < len(ids):
            end = min(start + batch.call_columns, len(ids))
            logits[start:end] = batch.prefill_all_logits(ids[start:end])
            start = end
        return logits

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
        (params,) = params_of_rows(self.defaults, fields, 1)
        return params


def _is_one(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether it is one prompt, and not several."""
    if isinstance(prompts, str):
        return True
    listed = isinstance(prompts, Sequence | np.ndarray)
    return listed and len(prompts) > 0 and isinstance(prompts[0], Integral)


def load(
    path: str | Path,
    provider: str = "cpu",
    *,
    verify: str = "auto",
    packed: bool = True,
    kv_budget: str | int | None = None,
    full_cache: bool = False,
    **session: Any,
) -> LanguageModel:
    """Open a package for generation.

    Args:
        path: Folder of the package.
        provider: Execution provider, a file name in `runtime/providers/`.
        verify: When files are hashed, see `open_package`.
        packed: Keep the weights, packed for this machine, in the user's cache: made once, then mapped by all
            sessions. Otherwise every session packs its own copy.
        kv_budget: Most bytes of the key and value cache of one batch: a number, or a text like "512MB". None
            for as much as the machine has.
        full_cache: Keep tokens that no sliding window sees any more, so that a chat can be rewound to
            anything without running it again.
        **session: More fields of `SessionConfig`: device_id, threads, allow_fallback, options, gpu_mem_limit,
            graph_capture.

    Raises:
        PackageError: The package is damaged.
        ProviderError: The provider is not known or not available, or does not run such packages.
    """
    config = SessionConfig(provider=provider, **session)
    budget = read_bytes(kv_budget)
    package = open_package(path, verify)
    opened = open_sessions(package, config, packed)
    tokenizer = Tokenizer.of_package(path, package.manifest.vocab_size)
    release_heap()
    states = opened.sessions.states
    if full_cache:
        states = tuple(dataclasses.replace(state, window=0) for state in states)
    sessions = dataclasses.replace(opened.sessions, kv_budget=budget, states=states)
    return LanguageModel(package, sessions, tokenizer, opened.fallback)
