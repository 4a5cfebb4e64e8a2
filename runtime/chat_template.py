"""Chat messages to one prompt text, through the model's own Jinja template, as `transformers` renders it.

A template comes with a checkpoint, so it is a stranger's program: it runs in Jinja's immutable sandbox
and sees plain JSON values only.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from onnxlm.errors import InputError, PackageError
from onnxlm.runtime.tokenizer import TOKENIZER_CONFIG_FILE, read_tokenizer_config, special_tokens

TEMPLATE_FILE = "chat_template.jinja"

# A message's reasoning has had several names; templates read the first or, a few, the second.
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")

# Stands at the end of a message to go on with; the space tells whether the template trims.
_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplate:
    """The chat templates of one model, most often a single one called "default".

    Args:
        templates: Jinja source by name; not empty.
        variables: What every template sees beside the messages: the special tokens' texts by key.
    """

    def __init__(self, templates: Mapping[str, str], variables: Mapping[str, str]) -> None:
        self.templates = dict(templates)
        self._variables = dict(variables)

    @classmethod
    def from_folder(cls, path: str | Path) -> ChatTemplate | None:
        """The templates of a package: chat_template.jinja, else those of tokenizer_config.json, else None.

        Raises:
            PackageError: A file is damaged, or its "chat_template" has another form.
        """
        config = read_tokenizer_config(path)
        file = Path(path) / TEMPLATE_FILE
        if file.is_file():
            try:
                templates = {"default": file.read_text(encoding="utf-8")}
            except UnicodeDecodeError as error:
                raise PackageError(f"{file} is not UTF-8", found=error) from error
        else:
            templates = _named(config.get("chat_template"))
        return cls(templates, special_tokens(config)) if templates else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        name: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation. It holds its special tokens: encode it without adding any.

        Args:
            messages: Objects with "role" and "content", as the template reads them; keys that are null
                count as absent.
            add_generation_prompt: End with what opens the assistant's turn.
            continue_final_message: End with the last message's text, so that the model goes on with it.
            tools: JSON schemas of functions that the model may call.
            documents: Texts to answer from.
            name: Which template, where there are several; by default "tool_use" when there are tools and
                there is one of that name, else "default".
            variables: More that the template reads ("enable_thinking").

        Raises:
            InputError: The template refuses the messages, cannot be run, or tries to leave the sandbox.
        """
        if isinstance(messages, str) or not messages:
            raise InputError("chat messages", found=repr(messages), allowed="at least one message")
        plain = [_message(message, i) for i, message in enumerate(messages)]
        if continue_final_message:
            _mark_end(plain[-1])
        values = {
            **self._variables,
            **_plain(variables or {}, "variables"),
            "messages": plain,
            "tools": _plain(tools, "tools"),
            "documents": _plain(documents, "documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        text = _run(self._pick(name, has_tools=tools is not None), values)
        return _cut_at_mark(text) if continue_final_message else text

    def _pick(self, name: str | None, has_tools: bool) -> str:
        if name is None:
            if len(self.templates) == 1:
                return next(iter(self.templates.values()))
            name = "tool_use" if has_tools and "tool_use" in self.templates else "default"
        if name not in self.templates:
            raise InputError(
                "chat template of this name",
                found=repr(name),
                allowed=", ".join(sorted(self.templates)),
            )
        return self.templates[name]


def _run(source: str, values: Mapping[str, Any]) -> str:
    """What a template makes of these variables."""
    try:
        return _compiled(source).render(values)
    except _Refusal as error:
        raise InputError(f"the chat template refuses the messages: {error}") from error
    except SecurityError as error:
        raise InputError(
            f"the chat template was stopped: {error}",
            fix="it does what no template needs; do not trust the place it comes from",
        ) from error
    except Exception as error:  # a stranger's program may raise anything
        raise InputError(
            f"the chat template cannot be run on these messages: {type(error).__name__}: {error}"
        ) from error


def _mark_end(message: dict[str, Any]) -> None:
    if not isinstance(message.get("content"), str):
        raise InputError(
            "the message to go on with has no text", found=repr(message.get("content"))
        )
    message["content"] += _END_MARK


def _cut_at_mark(text: str) -> str:
    """All before the mark; where the template trims a message's end, the space before it goes too."""
    at = text.rfind(_END_MARK.strip())
    if at < 0:
        raise InputError("the chat template leaves out the message to go on with")
    return text[:at] if text.startswith(_END_MARK, at) else text[:at].rstrip()


def _named(value: object) -> dict[str, str]:
    """Templates by name from the "chat_template" of a tokenizer_config.json."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        try:
            value = {entry["name"]: entry["template"] for entry in value}
        except (TypeError, KeyError):
            value = None
    if isinstance(value, dict) and all(isinstance(text, str) for text in value.values()):
        return value
    raise PackageError(
        f"{TOKENIZER_CONFIG_FILE}: field 'chat_template' has a wrong form",
        allowed="a template, or a list of objects with 'name' and 'template'",
    )


def _message(message: Mapping[str, Any], position: int) -> dict[str, Any]:
    """A message as templates expect it: plain, without nulls, its reasoning under the usual names."""
    if not isinstance(message, Mapping):
        raise InputError(
            f"chat message {position}",
            found=repr(message),
            allowed="an object with 'role' and 'content'",
        )
    plain = {key: value for key, value in message.items() if value is not None}
    plain = _plain(plain, f"chat message {position}")
    reasoning = next((plain[key] for key in _REASONING_KEYS if key in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _plain(value: Any, where: str) -> Any:
    """A copy of JSON values in Python's own types, whose methods the sandbox knows."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # an enum's own __str__ would give its name
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key, where): _plain(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_plain(item, where) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    raise InputError(
        f"{where} holds what a template cannot read",
        found=type(value).__name__,
        allowed="text, numbers, true, false, null, lists and objects",
    )


class _Refusal(jinja2.TemplateError):
    """A template's own `raise_exception`."""


class _GenerationTag(Extension):
    """{% generation %}: marks the assistant's words for training; here its body alone counts."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


class _SafeNamespace(Namespace):
    """Jinja's namespace() without names that reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *positional = args
        values = dict(*positional, **kwargs)
        for name in values:
            _check_namespace_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_namespace_name(name)
        super().__setitem__(name, value)


def _check_namespace_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold the name {name!r}")


class _DictFunction:
    """dict() and dict.fromkeys(), without the attributes of Python's type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _DictFunction(),
        "namespace": _SafeNamespace,
    }
    return environment.from_string(source)
