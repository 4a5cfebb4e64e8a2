"""Templates in the styles of well-known families, over many conversations: the text that transformers makes.

They are written for these tests with the constructs that the families' own use: macros, namespaces, tests,
filters, slices, string methods, loop controls, dates, refusals.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import jinja2
import pytest
from tokenizers import AddedToken, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from onnxlm.errors import InputError
from onnxlm.runtime.chat_template import ChatTemplate
from onnxlm.runtime.tokenizer import Tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

LLAMA3 = """{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- set tools = tools if tools is not none else none %}
{%- set date = date_string if date_string is defined else strftime_now("%d %b %Y") %}
{%- if messages[0].role == "system" %}
    {%- set head = messages[0]["content"] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set head = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if builtin_tools is defined %}{{- "Tools: " + builtin_tools | reject("equalto", "code") | join(", ") }}{%- endif %}
{{- "Today: " + date + "\\n\\n" + head + "<|eot_id|>" }}
{%- if tools is not none and messages | length > 0 %}
    {%- set first = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
    {{- "<|start_header_id|>user<|end_header_id|>\\n\\nFunctions:\\n\\n" }}
    {%- for t in tools %}{{- t | tojson(indent=4) + "\\n\\n" }}{%- endfor %}
    {{- first + "<|eot_id|>" }}
{%- endif %}
{%- for m in messages %}
    {%- if not (m.role == "ipython" or m.role == "tool" or "tool_calls" in m) %}
        {{- "<|start_header_id|>" + m.role + "<|end_header_id|>\\n\\n" + m.content | trim + "<|eot_id|>" }}
    {%- elif "tool_calls" in m %}
        {%- if not m.tool_calls | length == 1 %}{{- raise_exception("One call at a time!") }}{%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|python_tag|>{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + "}<|eom_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if m.content is mapping or m.content is iterable %}{{- m.content | tojson }}{%- else %}{{- m.content }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}{%- endif %}
"""  # noqa: E501 - a line of a template ends where its text does

CHATML = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{% for message in messages %}
<|im_start|>{{ message['role'] }}{{ ' ' ~ message.name if message.name is defined }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content or [] %}
{{ part.text if part.type == 'text' else '[' + part.type | upper + ']' }}{% endfor %}{% endif %}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {{ raise_exception('no system role here') }}
{%- endif -%}
{% for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("roles take turns: user, assistant, ...") }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif %}"""

MISTRAL = """{%- if messages[0].role == "system" %}
    {%- set system = messages[0].content %}{%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{%- set tools = none if tools is not defined else tools %}
{%- set users = rest | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(turn=0) %}
{%- for m in rest %}
    {%- if m.role in ("user", "assistant") and m.tool_calls is not defined %}
        {%- if (m.role == "user") != (ns.turn % 2 == 0) %}
            {{- raise_exception("after the system message roles take turns") }}
        {%- endif %}
        {%- set ns.turn = ns.turn + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for m in rest %}
    {%- if m.role == "user" %}
        {%- if tools is not none and m == users[-1] %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, value in tool.function.items() if key != "return" %}
                    {{- '"' + key + '": ' }}
                    {%- if value is string %}{{- '"' + value + '"' }}{%- else %}{{- value | tojson }}{%- endif %}
                    {{- ", " if not loop.last }}
                {%- endfor %}
                {{- "}}" + (", " if not loop.last else "]") }}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + (system + "\\n\\n" if loop.last and system is defined else "") + m.content + "[/INST]" }}
    {%- elif m.tool_calls is defined and m.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for call in m.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception("a call's id has nine characters") }}
            {%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (", " if not loop.last else "]" + eos_token) }}
        {%- endfor %}
    {%- elif m.role == "assistant" %}
        {{- " " + m.content | trim + eos_token }}
    {%- elif m.role == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + m.content | string + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception("a role that is not known: " ~ m.role) }}
    {%- endif %}
{%- endfor %}"""  # noqa: E501

REASONING = """{%- macro block(tag, text) -%}
<{{ tag }}>
{{ text }}
</{{ tag }}>
{%- endmacro -%}
{%- set ns = namespace(last=-1, found=false) -%}
{%- for m in messages | reverse -%}
    {%- if m.role == 'user' and not ns.found -%}{%- set ns.last = messages | length - loop.index -%}
    {%- set ns.found = true -%}{%- break -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
    {%- set content = m.content if m.content is string else '' -%}
    {%- if m.role == 'assistant' -%}
        {%- set thought = m.reasoning_content | default('', true) -%}
        {%- if not thought and '</think>' in content -%}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
        {%- endif -%}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
        <|{{ m.role }}|>
{% generation %}{% if loop.index0 > ns.last and thought %}{{ block('think', thought) }}
{% endif %}{{ content }}<|end|>{% endgeneration %}

    {%- elif loop.previtem is defined and loop.previtem.role == m.role -%}
        {{- '\\n' + content + '<|end|>' -}}
    {%- else -%}
        <|{{ m.role | replace('tool', 'observation') | lower }}|>
{{ content.title() if m.role == 'system' else content }}<|end|>
    {%- endif -%}
{%- endfor -%}
{%- if documents -%}{%- for d in documents -%}
{{ block('doc-' ~ loop.index, d.title | default('untitled') ~ ': ' ~ (d.text | truncate(12, True, '...'))) }}
{%- endfor -%}{%- endif -%}
{{- ('a', 1, 2.5, none, true) | tojson ~ messages | map(attribute='role') | unique | join('/') -}}
{%- if add_generation_prompt -%}<|assistant|>{{ '<think>' if enable_thinking | default(true) else '' }}{%- endif -%}"""  # noqa: E501

STYLES = {
    "llama3": LLAMA3,
    "chatml": CHATML,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "reasoning": REASONING,
}

USER = {"role": "user", "content": "  What is <b>&</b> 'x'?\n"}
ANSWER = {
    "role": "assistant",
    "content": '<think>\nHm.\n</think>\n\n日本 "quoted" {{ not_a_variable }} ',
}
SYSTEM = {"role": "system", "content": " be brief. "}
CALL = {
    "role": "assistant",
    "content": None,
    "reasoning": "Look it up.",
    "tool_calls": [
        {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": "weather", "arguments": {"place": "Köln", "days": [1, 2]}},
        }
    ],
}
RESULT = {"role": "tool", "content": "rain & wind", "tool_call_id": "abcdefghi"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "Look:"}, {"type": "image"}]}
CONVERSATIONS = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "turns": [USER, ANSWER, USER],
    "system_turns": [SYSTEM, USER, ANSWER, USER, ANSWER],
    "wrong_turns": [USER, USER, ANSWER],
    "answer_first": [ANSWER, USER],
    "tools": [SYSTEM, USER, CALL, RESULT, ANSWER, USER],
    "call_last": [USER, CALL],
    "bad_call": [USER, {**CALL, "tool_calls": [{"function": {"name": "f", "arguments": {}}}] * 2}],
    "parts": [PARTS],
    "named": [{**USER, "name": "Ada"}],
    "strange_role": [USER, {"role": "critic", "content": "no"}],
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Wetter für <Ort> & Tag",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
        "return": {"type": "string"},
    },
}
GIVEN: dict[str, dict[str, Any]] = {
    "nothing": {},
    "prompt": {"add_generation_prompt": True},
    "tools": {"tools": [TOOL, TOOL], "add_generation_prompt": True},
    "no_tools": {"tools": []},
    "documents": {
        "documents": [{"title": "T", "text": "a text of many words"}, {"text": "short"}],
        "add_generation_prompt": True,
    },
    "variables": {
        "variables": {
            "date_string": "1 May 2024",
            "enable_thinking": False,
            "builtin_tools": ["search", "code"],
            "custom_tools": [TOOL],
        },
        "add_generation_prompt": True,
    },
}


def theirs(template: str, messages: list[dict[str, Any]], given: dict[str, Any]) -> str | None:
    """What transformers makes of it; None when that fails."""
    backend = Backend(models.WordLevel({"<s>": 0, "</s>": 1}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **SPECIAL)
    options = {**given, **given.get("variables", {})}
    options.pop("variables", None)
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except (jinja2.TemplateError, TypeError):
        return None
    assert isinstance(text, str)
    return text


def ours(template: str, messages: list[dict[str, Any]], given: dict[str, Any]) -> str | None:
    try:
        return ChatTemplate({"default": template}, SPECIAL).render(
            messages, **{"add_generation_prompt": False, **given}
        )
    except InputError:
        return None


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_as_transformers(style: str, conversation: str) -> None:
    """The same text, or a refusal of both."""
    template, messages = STYLES[style], CONVERSATIONS[conversation]
    for name, given in GIVEN.items():
        assert ours(template, messages, given) == theirs(template, messages, given), name


def test_the_styles_say_something() -> None:
    """That the comparison above is not one of refusals."""
    for style, least in {
        "llama3": 9,
        "chatml": 12,
        "gemma": 4,
        "mistral": 6,
        "reasoning": 12,
    }.items():
        texts = [theirs(STYLES[style], messages, {}) for messages in CONVERSATIONS.values()]
        assert sum(text is not None and len(text) > 20 for text in texts) >= least, style
    today = datetime.now().strftime("%d %b %Y")
    assert f"Today: {today}" in (ours(LLAMA3, [USER], {}) or "")


@pytest.mark.parametrize(
    ("style", "conversation", "said"),
    [
        ("gemma", "system", "no system role here"),
        ("gemma", "wrong_turns", "roles take turns: user, assistant, ..."),
        ("mistral", "answer_first", "after the system message roles take turns"),
        ("mistral", "bad_call", "a call's id has nine characters"),
        ("mistral", "strange_role", "a role that is not known: critic"),
        ("llama3", "bad_call", "One call at a time!"),
    ],
)
def test_refusals_come_in_the_templates_words(style: str, conversation: str, said: str) -> None:
    template = ChatTemplate({"default": STYLES[style]}, SPECIAL)
    with pytest.raises(InputError) as caught:
        template.render(CONVERSATIONS[conversation])
    assert str(caught.value) == f"the chat template refuses the messages: {said}"


# Going on with a message


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("text", ["The capital", " The capital ", "a\n\n", "é 🤗"])
def test_a_message_is_gone_on_with_as_in_transformers(style: str, text: str) -> None:
    messages = [USER, {"role": "assistant", "content": text}]
    given = {"continue_final_message": True}
    got = ours(STYLES[style], messages, given)
    assert got is not None
    assert got == theirs(STYLES[style], messages, given)
    assert got.rstrip().endswith(text.strip())


def test_a_message_that_the_template_takes_apart_is_gone_on_with() -> None:
    """transformers refuses what it does not find whole; an answer's thoughts are moved by many a template."""
    messages = [USER, {"role": "assistant", "content": "<think>Hm.</think>The capital"}]
    got = ours(REASONING, messages, {"continue_final_message": True})
    assert (got or "").endswith("<|assistant|>\n<think>\nHm.\n</think>\nThe capital")


def test_a_message_that_cannot_be_gone_on_with() -> None:
    plain = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
    with pytest.raises(InputError, match="has no text; found None"):
        plain.render([USER, CALL], continue_final_message=True)
    with pytest.raises(InputError, match="leaves out the message to go on with"):
        plain.render([USER, ANSWER], continue_final_message=True)


# Special tokens in the text


def test_a_beginning_is_written_once() -> None:
    """A template writes BOS, and so would the tokenizer: as in transformers, the ids hold one."""
    backend = Backend(
        models.BPE({"<s>": 0, "</s>": 1, **{chr(c): c - 30 for c in range(32, 127)}}, [])
    )
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    messages = [{"role": "user", "content": "a <s> b"}]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Backend.from_str(backend.to_str()), chat_template=GEMMA, **SPECIAL
    )
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    text = ChatTemplate({"default": GEMMA}, SPECIAL).render(messages)
    for add_special_tokens in (False, True):
        ids = Tokenizer(backend, SPECIAL).encode(text, add_special_tokens)
        assert ids == list(expected)
    assert expected[0] == 0
    assert expected[1] != 0
