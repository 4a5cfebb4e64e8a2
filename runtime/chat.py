"""A conversation over one cache: each turn runs only the tokens that no turn before it has run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from onnxlm.errors import InputError
from onnxlm.runtime.chat_template import ChatTemplate
from onnxlm.runtime.engine import Batch

if TYPE_CHECKING:
    from onnxlm.runtime.model import LanguageModel, TextIterator

Message = dict[str, str]


class Chat:
    """Turns of a user and the model, rendered by the package's own template.

    A template may spell what it was given otherwise in a later turn (without an old answer's reasoning, say),
    and a model's tokens need not be those that its text is encoded to. So every turn renders and encodes
    the whole conversation, and the cache is rewound to where that first differs from what it holds.

    Args:
        model: What answers.
        system: A first message of role "system"; none when None.

    Raises:
        InputError: The package has no chat template.
    """

    def __init__(self, model: LanguageModel, system: str | None = None) -> None:
        template = ChatTemplate.from_folder(model.package.path)
        if template is None:
            raise InputError(
                f"{model.package.path}: has no chat template", fix="generate from plain text"
            )
        self._model = model
        self._template = template
        self._system = system
        self._reply: TextIterator | None = None
        self.reset()

    def reset(self) -> None:
        """Begin anew: the system message stays, all else is forgotten."""
        self.stop()
        self._reply = None
        self._messages = [] if self._system is None else [_message("system", self._system)]
        self._batch = Batch(self._model.sessions, 1)
        # The last prompt, from the conversation's start; the batch holds tokens of it and of the answer.
        self._sent: list[int] = []

    @property
    def messages(self) -> list[Message]:
        """The conversation, the current answer as far as it has come."""
        answer = [] if self._reply is None else [_message("assistant", self._reply.result.text)]
        return [dict(message) for message in (*self._messages, *answer)]

    def send(self, text: str, **fields: Any) -> TextIterator:
        """Say something; the answer comes piece by piece.

        The answer is part of the conversation as far as it was read: the next `send` ends one that still
        runs.

        Args:
            text: The user's message.
            **fields: As in `LanguageModel.generate`.

        Raises:
            InputError: The template refuses the messages, the conversation is longer than the context, or a
                field makes no sense. The conversation is what it was before.
        """
        messages = [*self.messages, _message("user", text)]
        prompt = self._template.render(messages)
        ids = self._model.encode(prompt, add_special_tokens=False)
        params = self._model.sampling_params(fields)
        self.stop()
        # One token must run even if all are known: their logits are gone.
        known = min(_common_prefix(self._held(), ids), len(ids) - 1)
        self._batch.rewind(known)
        self._reply = self._model.stream_after(self._batch, ids[known:], params)
        self._messages, self._sent = messages, ids
        return self._reply

    def stop(self) -> None:
        """End an answer that still runs; what was read of it stays."""
        if self._reply is not None:
            self._reply.close()

    def _held(self) -> list[int]:
        """The tokens in the cache."""
        answered = [] if self._reply is None else self._reply.result.token_ids
        return [*self._sent, *answered][: int(self._batch.lengths[0])]


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences have in common from the start."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (left, right) in pairs if left != right), min(len(a), len(b)))
