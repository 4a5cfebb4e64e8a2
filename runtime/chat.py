"""A conversation over one cache: each turn runs only the tokens that no turn before it has run."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxlm.errors import InputError
from onnxlm.runtime.chat_file import SavedChat, read_chat, write_chat
from onnxlm.runtime.engine import Batch
from onnxlm.runtime.streaming import REPLACEMENT
from onnxlm.runtime.text_iterator import AsyncTextIterator, TextIterator
from onnxlm.runtime.tokenizer import no_text

if TYPE_CHECKING:
    from onnxlm.runtime.model import LanguageModel

Message = dict[str, Any]


@dataclass(frozen=True)
class ChatSettings:
    """What the template is given beside the messages, see `ChatTemplate.render`.

    Attributes:
        tools: JSON schemas of functions that the model may call.
        documents: Texts to answer from.
        name: Which template, where the package has several.
        variables: More that the template reads.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    name: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


class Chat:
    """Turns of a user and the model, rendered by the package's own template.

    A template may spell what it was given otherwise in a later turn (without an old answer's reasoning, say),
    and a model's tokens need not be those that its text is encoded to. So every turn renders and encodes
    the whole conversation, and the cache is rewound to where that first differs from what it holds.

    A chat is for one thread at a time; an answer can be cancelled from any.

    Args:
        model: What answers.
        system: A first message of role "system"; none when None.
        share_prefix: Run the system message once for all chats of the model that begin with it, and copy the
            result; the model keeps it.
        settings: What the template is given beside the messages.

    Raises:
        InputError: The package has no tokenizer or no chat template, or that refuses the system message.
    """

    def __init__(
        self,
        model: LanguageModel,
        system: str | None = None,
        *,
        share_prefix: bool = False,
        settings: ChatSettings | None = None,
    ) -> None:
        # Jinja takes 25 ms to import, which most runs need not pay.
        from onnxlm.runtime.chat_template import ChatTemplate

        if not model.tokenizer.has_text:
            raise no_text()
        template = ChatTemplate.from_folder(model.package.path)
        if template is None:
            raise InputError(
                f"{model.package.path}: has no chat template", fix="generate from plain text"
            )
        self._model = model
        self._template = template
        self._system = system
        self._share_prefix = share_prefix
        self._settings = settings or ChatSettings()
        self._reply: TextIterator | None = None
        self.reset()

    @classmethod
    def load(cls, model: LanguageModel, path: str | Path) -> Chat:
        """A conversation that `save` wrote; its tokens are run again, at once.

        Raises:
            InputError, PackageError: The file is no saved chat, or holds tokens that the model has not.
        """
        saved = read_chat(path)
        try:
            settings = ChatSettings(**saved.settings)
        except TypeError as error:
            raise InputError(f"{path}: field 'settings'", found=error) from error
        chat = cls(model, saved.system, settings=settings)
        chat._messages = [dict(message) for message in saved.messages]
        chat._sent = list(saved.token_ids)
        if chat._sent:
            chat._batch.prefill_tokens([chat._sent])
        return chat

    def save(self, path: str | Path) -> None:
        """Write the conversation to a JSON file, the current answer as far as it has come.

        Raises:
            InputError: The file cannot be written.
        """
        settings = asdict(self._settings)
        write_chat(path, SavedChat(self._system, self.messages, settings, self.token_ids))

    def reset(self) -> None:
        """Begin anew: the system message stays, all else is forgotten."""
        self.stop()
        self._reply = None
        self._messages = [] if self._system is None else [_message("system", self._system)]
        # What of an answer was there before the current one began to go on with it.
        self._begun = ""
        # Tokens from the conversation's start; the batch holds the first of them and of the answer.
        self._sent = self._shared_prefix() if self._share_prefix else []
        if self._sent:
            self._batch = self._model.prefixes.begin(self._sent)
        else:
            self._batch = Batch(self._model.sessions, 1)

    @property
    def messages(self) -> list[Message]:
        """The conversation, the current answer as far as it has come."""
        messages = copy.deepcopy(self._messages)
        if self._reply is not None:
            messages.append(_message("assistant", self._begun + self._reply.result.text))
        return messages

    @property
    def token_ids(self) -> list[int]:
        """The tokens in the cache."""
        answered = [] if self._reply is None else self._reply.result.token_ids
        return [*self._sent, *answered][: int(self._batch.lengths[0])]

    @property
    def system(self) -> str | None:
        """The system message; what is assigned takes its place, and the turns stay."""
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        self._keep(self.messages)
        if self._messages and self._messages[0]["role"] == "system":
            del self._messages[0]
        self._system = text
        if text is not None:
            self._messages.insert(0, _message("system", text))

    def send(self, message: str | Mapping[str, Any], **fields: Any) -> TextIterator:
        """Say something; the answer comes piece by piece.

        The answer is part of the conversation as far as it was read: the next `send` ends one that still
        runs.

        Args:
            message: The user's words, or a message of another role ("tool") as the template reads it.
            **fields: As in `LanguageModel.generate`.

        Raises:
            InputError: The template refuses the messages, the conversation is longer than the context, or a
                field makes no sense. The conversation is what it was before.
        """
        said = _message("user", message) if isinstance(message, str) else dict(message)
        return self._run([*self.messages, said], "", fields)

    def asend(self, message: str | Mapping[str, Any], **fields: Any) -> AsyncTextIterator:
        """As `send`, for `async for`: the steps run in a worker thread, and end when the loop is left."""
        return AsyncTextIterator(self.send(message, **fields))

    def answer(self, **fields: Any) -> TextIterator:
        """Answer the last message, or go on with the answer that is there, as after `rewind`.

        Args:
            **fields: As in `LanguageModel.generate`.

        Raises:
            InputError: As in `send`, and when nothing was said, or the answer that is there is no text.
        """
        messages = self.messages
        begun = ""
        if messages and messages[-1]["role"] == "assistant":
            content = messages.pop().get("content")
            if not isinstance(content, str):
                raise InputError("the last message is an answer without text", found=repr(content))
            # Of a character that was cut in two nothing can be said again.
            begun = content.rstrip(REPLACEMENT)
        return self._run(messages, begun, fields)

    def stop(self) -> None:
        """End an answer that still runs; what was read of it stays."""
        if self._reply is not None:
            self._reply.close()

    def rewind(self, *, messages: int | None = None, tokens: int | None = None) -> None:
        """Forget the end of the conversation; what it begins with stays cached.

        Args:
            messages: How many messages stay, the system message counted.
            tokens: How many tokens of the conversation may stay. Messages that do not fit go; an answer that
                begins within them keeps what fits, and `answer` can go on with it.

        Raises:
            InputError: Not one of the two is given, or it is out of bounds.
        """
        now = self.messages
        if (messages is None) == (tokens is None):
            raise InputError("a chat is rewound to", allowed="a number of messages, or of tokens")
        if messages is not None:
            if not 0 <= messages <= len(now):
                raise InputError(
                    "messages that a chat is rewound to",
                    found=messages,
                    allowed=f"0 to {len(now)}",
                )
            self._keep(now[:messages])
        elif tokens is not None:
            if tokens < 0:
                raise InputError(
                    "tokens that a chat is rewound to", found=tokens, allowed="0 or more"
                )
            self._keep(self._first_tokens(now, tokens))

    def fork(self) -> Chat:
        """Another chat that has come to the same point; from here on the two share nothing."""
        other = copy.copy(self)
        other._messages, other._sent = self.messages, self.token_ids
        other._reply, other._begun = None, ""
        other._batch = self._batch.fork()
        return other

    def _run(self, messages: list[Message], begun: str, fields: Mapping[str, Any]) -> TextIterator:
        if begun:
            ids = self._encode([*messages, _message("assistant", begun)], goes_on=True)
        else:
            ids = self._encode(messages)
        params = self._model.sampling_params(fields)
        self.stop()
        # One token must run even if all are known: their logits are gone.
        known = min(_common_prefix(self.token_ids, ids), len(ids) - 1)
        known = int(self._batch.rewind(known)[0])
        self._reply = self._model.stream_after(
            self._batch, ids[known:], params, ids[:known], begun=ids if begun else ()
        )
        self._messages, self._sent, self._begun = messages, ids, begun
        return self._reply

    def _keep(self, messages: list[Message]) -> None:
        """Let these be the conversation; the next turn sees what of the cache they can use."""
        self.stop()
        self._sent = self.token_ids
        self._messages, self._reply, self._begun = messages, None, ""

    def _encode(self, messages: Sequence[Message], goes_on: bool = False) -> list[int]:
        """Tokens up to the next answer, or up to where the last message goes on."""
        prompt = self._template.render(
            messages,
            add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
            **vars(self._settings),
        )
        return self._model.encode(prompt, add_special_tokens=False)

    def _first_tokens(self, messages: list[Message], count: int) -> list[Message]:
        """What the first `count` tokens say; a part of a message only if it is an answer."""
        for kept in range(len(messages), 0, -1):
            head, last = messages[: kept - 1], messages[kept - 1]
            is_answer = last["role"] == "assistant"
            try:
                ids = self._encode(messages[:kept], goes_on=is_answer)
                start = len(self._encode(head)) if is_answer and head else 0
            except InputError:  # a template may not take every beginning of a conversation
                continue
            if len(ids) <= count:
                return messages[:kept]
            if is_answer and start < count:
                return self._begun_within(head, ids, start, count)
        return []

    def _begun_within(
        self, head: list[Message], ids: Sequence[int], start: int, count: int
    ) -> list[Message]:
        """What of an answer, tokens from `start` on, is within `count` tokens: whole characters."""
        decode = self._model.tokenizer.decode
        before = len(decode(ids[:start]))
        for end in range(count, start, -1):
            text = decode(ids[:end])[before:].rstrip(REPLACEMENT)
            messages = [*head, _message("assistant", text)]
            # What a part is encoded to need not be a part of what the whole was.
            if text and len(self._encode(messages, goes_on=True)) <= count:
                return messages
        return head

    def _shared_prefix(self) -> list[int]:
        """The tokens that every conversation with this system message begins with."""
        if not self._messages:
            return []
        one, other = (self._encode([*self._messages, _message("user", text)]) for text in "ab")
        return one[: _common_prefix(one, other)]


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences have in common from the start."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (left, right) in pairs if left != right), min(len(a), len(b)))
