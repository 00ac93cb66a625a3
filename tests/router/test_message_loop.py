"""Templates that remember what they wrote write what they would without."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router import chat_memory, chat_template
from router.chat_memory import ChatMemory
from router.chat_template import ChatTemplate
from router.errors import TokenizationError

# In the shapes of models' own templates: loops that write each message by itself ...
CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n'
 + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}
{{ '<|im_start|>assistant\n' }}{% endif %}"""
AS_LLAMA_3 = """{{- bos_token }}{%- if messages[0].role == 'system' %}{%- set system = messages[0].content | trim %}
{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}{{- system }}
{%- if tools is not none %}{{- tools | tojson }}{% endif %}
{%- for message in messages %}{%- if message.role == 'tool' or 'tool_calls' in message %}
{%- if message.tool_calls and not message.tool_calls | length == 1 %}{{- raise_exception('one call') }}{%- endif %}
{%- for call in message.tool_calls %}{%- set function = call.function %}{{- loop.index ~ function.name }}
{%- if builtin is defined and function.name in builtin %}{{ builtin }}{%- endif %}
{{- function.arguments | tojson }}{%- if not loop.last %}, {% endif %}{% else %}none at {{ loop.index0 }}
{%- endfor %}{%- else %}{{- message.role + message.content | trim + '<|eot|>' }}{%- endif %}{%- endfor %}"""
AS_MISTRAL = """{{ bos_token }}{% set chat = messages %}{% for message in chat %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) and strict %}
{{ raise_exception('alternate') }}{% endif %}
{{ '[INST] ' if loop.first else loop.index ~ ' [INST] ' }}{% set shown = message.content.strip() %}{{ shown }}
{% if loop.last %}{{ ' (last)' }}{% endif %}{% endfor %}"""
AS_GEMMA = """{{ bos_token }}{% if messages[0].role == 'system' %}{% set prefix = messages[0].content + '\n' %}
{% set messages = messages[1:] %}{% else %}{% set prefix = '' %}{% endif %}{% for message in messages %}
{% set role = 'model' if message.role == 'assistant' else message.role %}
{{ role + '\n' + (prefix if loop.first else '') }}
{% if message.content is string %}{{ message.content | trim }}{% else %}{% for item in message.content %}
{{ item.text | trim }}{% endfor %}{% endif %}{{ seen }}{% set seen = 'never' %}{% endfor %}"""
TWO_LOOPS = """{% if add_generation_prompt %}{% for m in messages %}{{ m.role }}{% endfor %}
{% else %}{{ none }}{% endif %}
{% for m in messages | reverse %}{{ m.content }}{% endfor %}
{% for m in messages if m.name %}{{ m.name }}{% endfor %}"""
PLAIN = [CHATML, AS_LLAMA_3, AS_MISTRAL, AS_GEMMA]
# ... ones that read other messages or values that cannot be compared there, which are written anew ...
READ_MORE = [
    "{% for m in messages %}{% if loop.index0 == 0 or messages[loop.index0 - 1].role != m.role %}"
    "{{ m.role }}:{% endif %}{{ m.content }}{% endfor %}",
    "{% set ns = namespace(at=messages | length) %}{% for m in messages %}{{ ns.at }}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{{ tools }}{% endfor %}",
]
# ... and ones that do more.
NOT_PLAIN = [
    TWO_LOOPS,
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{{ ns.n }}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ loop.length }}{{ loop.nextitem }}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ loop['index'] }}{{ loop.cycle('a', 'b') }}{% endfor %}",
    "{% for m in messages %}{% if loop.index > 3 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "{% macro of(m) %}{{ m.content }}{{ messages | length }}{% endmacro %}"
    "{% for m in messages %}{{ of(m) }}{% endfor %}",
    "{% for m in messages %}{{ strftime_now('%Y') }}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ (m.content or [1]) | map('random') | first }}{% endfor %}",
    "{% for m in messages recursive %}{{ m.content }}{% else %}nothing{% endfor %}",
    "{{ messages[-1].content }}",
]

TEXTS = st.sampled_from(["", "hi", " padded\n", "é東😀", "<|im_end|>", "{{ 1 }}", "user", "1"])
CALLS = st.lists(
    st.builds(lambda n: {"function": {"name": f"f{n}", "arguments": '{"a": [1, true]}'}}, st.integers(0, 3)),
    max_size=2,
)
MESSAGES = st.one_of(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": TEXTS}
    ),
    st.fixed_dictionaries({"content": TEXTS, "role": st.just("user"), "name": st.just("n")}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": st.none(), "tool_calls": CALLS}),
    st.builds(lambda text: {"role": "user", "content": [{"type": "text", "text": text}]}, TEXTS),
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "add_generation_prompt": st.booleans(),
        "continue_final_message": st.booleans(),
        "tools": st.sampled_from([None, [], [{"function": {"name": "f", "parameters": {"b": 1, "a": 2}}}]]),
        "chat_template_kwargs": st.dictionaries(
            st.sampled_from(["strict", "builtin", "seen", "prefix"]),
            st.sampled_from([1, True, 1.0, "1", None, ["f1"]]),
        ),
    },
)


@pytest.fixture(autouse=True)
def short_chats(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (chat_memory, chat_template):
        monkeypatch.setattr(module, "FEWEST_MESSAGES", 2)
    yield


def rendered(template: ChatTemplate, document: dict[str, Any]) -> str:
    try:
        return template.render(document)
    except TokenizationError as error:
        return f"failed: {error}"


@cache
def both(source: str) -> tuple[ChatTemplate, ChatTemplate]:
    """A template that remembers, if it can, and one that does not."""
    template, other = (ChatTemplate(source, {"bos_token": "<s>"}) for _ in range(2))
    other._of_long = None
    return template, other


@pytest.mark.parametrize("source", PLAIN + READ_MORE + NOT_PLAIN)
@settings(max_examples=40)
@given(
    chats=st.lists(
        st.tuples(st.integers(0, 12), st.lists(MESSAGES, min_size=1, max_size=6), FIELDS), max_size=8
    )
)
def test_chats_that_grow_and_branch(source: str, chats: list[tuple[int, list[Any], dict[str, Any]]]) -> None:
    template, other = both(source)
    messages: list[Any] = []
    for kept, added, fields in chats:
        messages = messages[:kept] + added
        document = {"messages": messages, **fields}
        assert rendered(template, document) == rendered(other, document)


@pytest.mark.parametrize(
    ("source", "plain"),
    [*((source, True) for source in PLAIN + READ_MORE), *((source, False) for source in NOT_PLAIN)],
)
def test_which_templates_remember(source: str, plain: bool) -> None:
    assert (ChatTemplate(source, {"bos_token": ""})._of_long is not None) is plain


@pytest.mark.parametrize("source", PLAIN)
def test_only_new_messages_are_rendered(source: str) -> None:
    template, other = both(source)
    given = [{"role": ("user", "assistant")[i % 2], "content": f"text {i}"} for i in range(20)]
    assert template.render({"messages": given[:17]}) == other.render({"messages": given[:17]})
    given[3]["content"] = "which nobody may change"  # shows that it is not looked at
    text = template.render({"messages": given})
    assert "nobody" not in text and "text 2" in text and "text 19" in text


def test_memory_is_bounded() -> None:
    class Made:
        cost_bytes = 100

    memory: ChatMemory[Made] = ChatMemory(100_000)
    for number in range(100):
        messages: list[Any] = [{"number": number}, *({} for _ in range(number % 50))]
        memory.keep(messages, Made())
        assert 0 <= memory.kept_bytes <= 100_000
        assert memory.find([*messages, "new"])[1] == (len(messages) if number % 50 else 0)
    assert memory.kept_bytes > 50_000
    too_long: list[Any] = [{}] * 1_000
    memory.keep(too_long, Made())
    assert memory.find(too_long) == (None, 0)
