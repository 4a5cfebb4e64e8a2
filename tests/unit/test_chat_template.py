"""Chat prompts are those of transformers' apply_chat_template, and a hostile template gets nowhere."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from onnxlm.errors import InputError, PackageError
from onnxlm.runtime.chat_template import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '\
<|im_start|>system
You are a helpful AI assistant<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.content is not none and message.role == 'tool' %}
        {%- continue %}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """{{ bos_token }}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if message['role'] == 'user' %}
        {{ '[INST] ' + message['content'] + ' [/INST]' }}
    {% elif message['role'] == 'assistant' %}
        {% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
    {% else %}
        {{ raise_exception('Only user and assistant roles are supported!') }}
    {% endif %}
{% endfor %}
"""

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, calls=0) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" %}{%- set ns.last = loop.revindex0 %}{%- break %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role }}
    {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
    {%- if loop.index0 > ns.last and message.reasoning_content %}
        {{- '\\n<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>' }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {%- set ns.calls = ns.calls + 1 %}
        {%- if call.function %}{%- set call = call.function %}{%- endif %}
        {{- '\\n<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
        {{- (call.arguments | tojson(indent=2)) ~ '}' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if documents %}{%- for d in documents %}{{- d.title ~ ': ' ~ d.text ~ '\\n' }}{%- endfor %}{%- endif %}
{{- ns.calls }}{{ dict(a=1) | tojson }}{{ enable_thinking is defined and enable_thinking }}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

TURNS = [
    {"role": "user", "content": "  What is <b>&</b> 'x'?\n"},
    {"role": "assistant", "content": '日本 "quoted" {{ not_a_variable }}'},
    {"role": "user", "content": "And é 🤗?"},
]
SYSTEM = [{"role": "system", "content": " Be brief. "}, *TURNS]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Wetter für <Ort> & Tag",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
TOOL_TURNS = [
    *TURNS,
    {
        "role": "assistant",
        "content": None,
        "thinking": "\nLook it up.\n",
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"place": "Köln"}}}
        ],
    },
    {"role": "tool", "content": "rain"},
]


def reference(template: str, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    """What transformers makes of it."""
    backend = Backend(models.WordLevel({"<s>": 0, "</s>": 1}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **SPECIAL)
    text = tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("generation_prompt", [False, True])
@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (CHATML, TURNS),
        (CHATML, SYSTEM),
        (LLAMA3, TURNS),
        (LLAMA3, SYSTEM),
        (LLAMA3, [*SYSTEM, {"role": "tool", "content": "skipped"}]),
        (MISTRAL, TURNS),
        (MISTRAL, TURNS[:1]),
        (QWEN, TURNS),
        (QWEN, TOOL_TURNS),
    ],
)
def test_renders_as_transformers(
    template: str, messages: list[dict[str, Any]], generation_prompt: bool
) -> None:
    ours = ChatTemplate({"default": template}, SPECIAL)
    got = ours.render(messages, add_generation_prompt=generation_prompt)
    assert got == reference(template, messages, add_generation_prompt=generation_prompt)
    assert "é" in got or len(messages) == 1


@pytest.mark.parametrize(
    "kwargs",
    [
        {"tools": [TOOL, TOOL]},
        {"documents": [{"title": "T", "text": "ü"}]},
        {"tools": [], "documents": []},
        {
            "tools": [TOOL],
            "documents": [{"title": "T", "text": "x"}],
            "variables": {"enable_thinking": False},
        },
        {"variables": {"enable_thinking": True, "bos_token": "other"}},
    ],
)
def test_tools_documents_and_variables_as_transformers(kwargs: dict[str, Any]) -> None:
    theirs = {key: value for key, value in kwargs.items() if key != "variables"}
    expected = reference(QWEN, TOOL_TURNS, **theirs, **kwargs.get("variables", {}))
    ours = ChatTemplate({"default": QWEN}, SPECIAL)
    assert ours.render(TOOL_TURNS, add_generation_prompt=False, **kwargs) == expected


def test_values_are_plain_copies() -> None:
    """Values in Python's own types, HTML not escaped, caller's messages untouched."""

    class Role(str, Enum):  # noqa: UP042 - the older form, whose str() is its name
        USER = "user"

    messages = [
        {"role": Role.USER, "content": np.float32(0.5), "more": (1, [np.int64(2)]), "gone": None}
    ]
    before = [dict(message) for message in messages]
    template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }} {{ m.more }} {{ 'gone' in m }} {{ '<&>' }}"
        "{% endfor %}"
    )
    got = ChatTemplate({"default": template}, {}).render(messages)
    assert got == "user 0.5 (1, [2]) False <&>" == reference(template, messages)
    assert messages == before


# Refusals


def test_a_template_refuses_messages_in_its_own_words() -> None:
    template = ChatTemplate({"default": MISTRAL}, SPECIAL)
    with pytest.raises(InputError) as caught:
        template.render(TURNS[1:])
    assert str(caught.value) == (
        "the chat template refuses the messages: "
        "Conversation roles must alternate user/assistant/user/assistant/..."
    )
    with pytest.raises(jinja2.TemplateError):
        reference(MISTRAL, TURNS[1:])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception.__globals__['json'] }}{{ raise_exception.__globals__.json }}",
        "{{ messages.append({}) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ dict.__class__.__base__ }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ ('%s' | attr('format'))|attr('__func__')|attr('x') }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{% for i in range(1000000000) %}{% endfor %}",
    ],
)
def test_a_hostile_template_is_stopped(source: str) -> None:
    with pytest.raises(InputError, match=r"the chat template (was stopped|cannot be run)"):
        ChatTemplate({"default": source}, SPECIAL).render(TURNS)


def test_the_classic_escape_is_named() -> None:
    with pytest.raises(InputError) as caught:
        ChatTemplate({"default": "{{ ''.__class__.__mro__ }}"}, {}).render(TURNS)
    assert str(caught.value) == (
        "the chat template was stopped: access to attribute '__class__' of 'str' object is unsafe.; "
        "it does what no template needs; do not trust the place it comes from"
    )


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ absent.field }}", "UndefinedError: 'absent' is undefined"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ],
)
def test_a_broken_template_is_one_line(source: str, shown: str) -> None:
    with pytest.raises(
        InputError, match="the chat template cannot be run on these messages"
    ) as caught:
        ChatTemplate({"default": source}, {}).render(TURNS)
    assert shown in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "shown"),
    [
        ([], "chat messages; found []; allowed: at least one message"),
        ("hello", "chat messages; found 'hello'"),
        (["hello"], "chat message 0; found 'hello'; allowed: an object with 'role' and 'content'"),
        (
            [*TURNS, {"role": "user", "content": b"x"}],
            "chat message 3 holds what a template cannot read; found bytes",
        ),
    ],
)
def test_bad_messages_are_refused(messages: Any, shown: str) -> None:
    with pytest.raises(InputError) as caught:
        ChatTemplate({"default": CHATML}, {}).render(messages)
    assert shown in str(caught.value)


# Files


def write(folder: Path, config: object = None, template: bytes | None = None) -> Path:
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_bytes(template)
    return folder


def rendered(folder: Path, **kwargs: Any) -> str:
    template = ChatTemplate.from_folder(folder)
    assert template is not None
    return template.render(TURNS, **kwargs)


def test_folder_without_a_template(tmp_path: Path) -> None:
    assert ChatTemplate.from_folder(tmp_path) is None
    assert ChatTemplate.from_folder(write(tmp_path, {"chat_template": None})) is None


def test_template_of_the_config_and_the_file_that_replaces_it(tmp_path: Path) -> None:
    config = {
        "chat_template": "{{ bos_token }}{{ eos_token }}{{ pad_token }}",
        "bos_token": {"content": "<b>"},
    }
    assert rendered(write(tmp_path, config)) == "<b>"
    assert rendered(write(tmp_path, None, "é{{ bos_token }}".encode())) == "é<b>"


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    folder = write(tmp_path, {"chat_template": named})
    assert rendered(folder) == "plain"
    assert rendered(folder, tools=[TOOL]) == "tools"
    assert rendered(folder, name="tool_use") == "tools"
    assert rendered(folder, name="default", tools=[TOOL]) == "plain"
    with pytest.raises(InputError, match="found 'rag'; allowed: default, tool_use"):
        rendered(folder, name="rag")


@pytest.mark.parametrize("value", [3, [3], [{"name": "x"}], {"default": 3}, ["x"]])
def test_a_template_of_another_form_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(PackageError, match="field 'chat_template' has a wrong form"):
        ChatTemplate.from_folder(write(tmp_path, {"chat_template": value}))


def test_a_template_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match=r"chat_template\.jinja is not UTF-8"):
        ChatTemplate.from_folder(write(tmp_path, None, b"\xff"))


@pytest.mark.real_model
def test_real_template_against_transformers(smollm2: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from onnxlm.models import checkpoint

    for name, data in checkpoint.read(smollm2).tokenizer_files.items():
        (tmp_path / name).write_bytes(data)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for messages in (TURNS, SYSTEM):
        for prompt in (True, False):
            expected = theirs.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt
            )
            template = ChatTemplate.from_folder(tmp_path)
            assert template is not None
            assert template.render(messages, add_generation_prompt=prompt) == expected
