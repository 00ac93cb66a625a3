"""Texts put together by their shapes are those that the templates write."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_templates import MODELS

from router import chat_memory, chat_template
from router.chat_template import ChatTemplate
from router.errors import TokenizationError
from router.template_environment import template_environment
from router.template_shapes import Shape, TemplateShapes
from router.unknown_text import LEFT, RIGHT

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

# What may be done to contents without reading them ...
COPYING = [
    "{{ m.content }}",
    "{{ m['content'] ~ '' ~ loop.index }}",
    "{{ m.content | string }}",
    "{{ m.content | trim | default('x') }}",
    "{{ m.content or 'none' }}",
    "{{ m.get('content', '') }}",
    "{% for name, value in m.items() %}{{ name }}={{ value }};{% endfor %}",
    "{% set x %} {{ m.content }}. {% endset %}{{ x | trim }}|{{ x.lstrip() }}",
    "{% set x | trim %}\n{{ m.content }} {% endset %}{{ x }}",
    "{{ (' ' + m.content + ' ' + messages[0].content + '\n').strip() }}",
    "{{ (m.content + ' ').lstrip() }}|{{ (' ' ~ m.content).rstrip() }}",
    "{% filter trim %}  {{ m.content }}{% endfilter %}",
    "{% macro said(x) %}<{{ x }}>{% endmacro %}{{ said(m.content) | trim }}{{ (said(m.content) ~ ' ').strip() }}",
    "{% macro said() %}<{{ caller() }}>{% endmacro %}{% call said() %}{{ m.content }}{% endcall %}",
    "{% if m.content %}{{ m.content }}{% else %}nothing{% endif %}",
    "{% if m.content is none or m.content == none or m.content == '' %}nothing{% endif %}{{ m.content }}",
    "{% if 'x' in m.content %}{{ m.content | upper }}{% else %}{{ m.content.strip() }}{% endif %}",
    "{% if m.content.startswith('x') or m.content.endswith(' ') %}{{ m.content | upper }}{% endif %}",
    "{{ m.content.split('x')[0] }}{{ m.content.split('y', 1) | last }}",
    "{% if 'a' in 'ab' + m.content %}{{ m.content }}{% endif %}{{ ('ab' ~ m.content).startswith('ac') }}",
    "{{ m.content.text }}{{ m.content['text'] is defined }}{{ m.content.content is defined }}",
    "{{ m.content is string }}{{ m.content is mapping }}{{ m.content is iterable }}{{ m.content is number }}",
    "{{ [m.content, 'a'] | first }}{{ (messages | map(attribute='content') | list)[-1] }}",
    "{{ messages | length }}{{ m.role | upper }}",
    "{% if m.role == 'user' %}{{ m.content }}{% endif %}{% generation %}{{ m.content }}{% endgeneration %}",
]
# ... and what reads them, or may write another text the next time.
READING = [
    "{{ m.content | upper }}",
    "{{ m.content | capitalize }}",
    "{{ m.content | length }}",
    "{{ m.content | tojson }}",
    "{{ m | tojson }}",
    "{{ messages | tojson(indent=2) }}",
    "{{ m.content | replace('a', 'b') }}",
    "{{ m.content | e }}",
    "{{ m.content | safe }}",
    "{{ m.content | indent }}",
    "{{ m.content | wordcount }}",
    "{{ m.content | first }}",
    "{{ m.content | last }}",
    "{{ m.content | list }}",
    "{{ m.content | int }}",
    "{{ m.content | trim('x') }}",
    "{{ [m.content] | map('upper') | list }}",
    "{{ [m.content] | join }}",
    "{{ [m.content, 'a'] | sort }}",
    "{{ [m.content, 'a'] | unique | list }}",
    "{{ ['a', m.content] | select('eq', 'a') | list }}",
    "{{ [[m.content]] | map(attribute='0.0') | list }}",
    "{{ messages | groupby('content') }}",
    "{{ '%s' | format(m.content) }}",
    "{{ '%s' % m.content }}",
    "{{ 'x' % m.content }}",
    "{{ '{}'.format(m.content) }}",
    "{{ m.content % 'a' }}",
    "{{ m.content * 2 }}",
    "{{ m.content.strip('\n') }}",
    "{{ m.content.split()[0] }}",
    "{{ m.content.split('x', m.content) }}",
    "{{ m.content.replace('a', 'b') }}",
    "{{ m.content.upper() }}",
    "{{ m.content.__class__ }}",
    "{{ m.content.strip }}",
    "{{ m.content[0] }}",
    "{{ m.content[:3] }}",
    "{{ 'abc'[m.content] is defined }}",
    "{{ 'abc'[:m.content] }}",
    "{{ m[m.content] is defined }}",
    "{{ m.content == 'x' }}",
    "{{ m.content != messages[0].content + '' }}",
    "{{ m.content < 'x' }}",
    "{{ m.content in 'xyz' }}",
    "{{ m.content in ['x'] }}",
    "{{ m.content in m }}",
    "{{ m.content in m.content + '' }}",
    "{{ 'ab' in 'a' + m.content }}",
    "{{ 'x'.startswith(m.content) }}",
    "{{ 'x,y'.split(m.content) }}",
    "{{ ', '.join([m.content]) }}",
    "{{ 'x'.replace(m.content, '') }}",
    "{{ {m.content: 1} }}",
    "{{ {'x': 1}[m.content] }}",
    "{{ {'x': 1}.get(m.content) }}",
    "{{ {'x': m.content} }}",
    "{{ m }}",
    "{{ messages }}",
    "{{ m.items() }}",
    "{% for letter in m.content %}{{ letter }}{% endfor %}",
    "{% set a, b = m.content %}",
    "{{ dict(m.content) }}",
    "{{ range(m.content) }}",
    "{{ m.content is upper }}",
    "{{ m.content is sameas messages[0].content }}",
    "{{ m is sameas messages[0] }}",
    "{{ m.content is eq 'x' }}",
    "{{ 'x' is in m.content }}",
    "{{ m | attr('content') | attr('upper') }}",
    "{% filter upper %}{{ m.content }}{% endfilter %}",
    "{% filter list %}{{ m.content }}{% endfilter %}",
    "{% set x %}{{ m.content }}{% endset %}{{ x | length }}",
    "{% macro said(x) %}{{ x }}{% endmacro %}{{ said(m.content)[0] }}",
    "{% autoescape true %}{{ m.content }}{% endautoescape %}",
    "{{ '<' | e + m.content }}",
    "{{ '<' | safe in m.content }}",
    "{{ m.keys }}{{ m.content }}",
    "{{ m | reverse | string | title }}{{ m.content }}",
    "{{ m.content }}{{ strftime_now('%Y') }}",
    "{{ m.content }}{{ [1, 2] | random }}",
    "{{ m.content }}{{ lipsum() }}",
    "{{ m.content }}{{ raise_exception('no') }}",
    "{{ m.content }}{{ m.missing.missing }}",
    "{{ m.content + m.missing }}",
    "{{ m.content }}{{ 'a' is sameas 'a' }}",
]

TEXTS = st.one_of(
    st.sampled_from(
        [
            "",
            " ",
            "x",
            "hello",
            " padded\n",
            "\u2003é東😀\x85",
            "<|im_end|>",
            "{{ 1 }}",
            "role",
            "upper",
            "%s",
            "</s>",
            "<think>a</think>\n\nb",
            "<tool_response>1</tool_response>",
            "a/nothink",
            "\n",
            "' at 0x",
            "Ab,c",
            "<b>&",
        ]
    ),
    st.text(st.characters(codec="utf-8"), max_size=6),
)
ROLES = st.one_of(
    st.sampled_from(["system", "user", "assistant", "tool", "developer", "é", "</think>", "x "]),
    st.sampled_from(["user", "assistant"]),
)
ALTERNATING = st.builds(
    lambda system, n: (["system"] if system else []) + [("user", "assistant")[i % 2] for i in range(n)],
    st.booleans(),
    st.integers(0, 9),
)
CHATS = st.one_of(ALTERNATING, st.lists(ROLES, max_size=6)).flatmap(
    lambda roles: st.tuples(st.just(tuple(roles)), st.tuples(*(TEXTS for _ in roles)))
)


def of_each(body: str) -> str:
    return "{% for m in messages %}" + body + "\n{% endfor %}"


@cache
def both(source: str) -> tuple[ChatTemplate, TemplateShapes]:
    template = ChatTemplate(source, SPECIAL)
    return template, TemplateShapes(template)


def holds(shape: Shape, contents: tuple[str, ...]) -> bool:
    return all(text not in contents[message] for message, text in shape.absent) and all(
        contents[message].strip() for message in shape.not_blank
    )


def assembled(shape: Shape, contents: tuple[str, ...]) -> str:
    parts = [shape.literals[0]]
    for message, sides, literal in zip(shape.contents, shape.stripped, shape.literals[1:], strict=True):
        content = contents[message]
        content = content.lstrip() if sides & LEFT else content
        parts += [content.rstrip() if sides & RIGHT else content, literal]
    return "".join(parts)


def rendered(template: ChatTemplate, roles: tuple[str, ...], contents: tuple[str, ...]) -> str:
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
    if len(roles) % 2:
        messages = [{"content": each["content"], "role": each["role"]} for each in messages]
    try:
        return template.render({"messages": messages})
    except TokenizationError as error:
        return f"failed: {error}"


def check(source: str, roles: tuple[str, ...], contents: tuple[str, ...]) -> None:
    template, shapes = both(source)
    shape = shapes.of(roles)
    if shape is not None and holds(shape, contents):
        assert assembled(shape, contents) == rendered(template, roles, contents)


@pytest.mark.parametrize("source", [*MODELS.values(), *map(of_each, COPYING), *map(of_each, READING)])
@settings(max_examples=30)
@given(chat=CHATS)
def test_assembled_texts_are_what_templates_write(
    source: str, chat: tuple[tuple[str, ...], tuple[str, ...]]
) -> None:
    check(source, *chat)


@pytest.mark.parametrize("source", MODELS.values(), ids=MODELS)
def test_long_chats(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (chat_memory, chat_template):
        monkeypatch.setattr(module, "FEWEST_MESSAGES", 2)
    roles = ("system", *(("user", "assistant")[i % 2] for i in range(99)))
    contents = tuple(f" text {i}\n" for i in range(100))
    shape = both(source)[1].of(roles)
    assert shape is not None and holds(shape, contents) and set(shape.contents) == set(range(100))
    check(source, roles, contents)


@pytest.mark.parametrize("body", COPYING)
def test_what_does_not_read_contents_has_a_shape(body: str) -> None:
    assert both(of_each(body))[1].of(("user", "assistant")) is not None


@pytest.mark.parametrize("body", READING)
def test_what_reads_contents_has_none(body: str) -> None:
    assert both(of_each(body))[1].of(("user", "assistant")) is None


def test_shapes_of_models() -> None:
    def shape(name: str, *roles: str) -> Shape | None:
        return both(MODELS[name])[1].of(roles)

    end = "<|im_end|>\n<|im_start|>assistant\n"
    assert shape("chatml", "system", "user") == Shape(
        ("<|im_start|>system\n", "<|im_end|>\n<|im_start|>user\n", end), (0, 1), (0, 0), (), ()
    )
    assert shape("thinking", "user", "assistant", "user") == Shape(
        ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>\n<|im_start|>user\n", end),
        (0, 1, 2),
        (0, 0, 0),
        ((2, "<tool_response>"), (1, "</think>")),
        (),
    )
    assert shape("thinking", "user", "assistant") is None  # strips line ends only
    assert shape("headers", "user") == Shape(
        (
            "<s><|start|>system<|end|>\n\nToday: 26 Jul 2024\n\n<|eot|><|start|>user<|end|>\n\n",
            "<|eot|><|start|>assistant<|end|>\n\n",
        ),
        (0,),
        (LEFT | RIGHT,),
        (),
        (),
    )
    assert shape("headers", "user", "tool") is None  # written as JSON
    assert shape("brackets", "system", "user") == Shape(
        ("<s>[INST] <<SYS>>\n", "\n<</SYS>>\n\n", " [/INST]\n"), (0, 1), (0, RIGHT), (), (1,)
    )
    assert shape("brackets", "assistant") is None  # refused
    assert shape("turns", "system", "user") == Shape(
        ("<s><start_of_turn>user\n", "\n\n", "<end_of_turn>\n<start_of_turn>model\n"),
        (0, 1),
        (0, LEFT | RIGHT),
        (),
        (),
    )
    filled = shape("filled", "system", "user")
    assert filled is not None and filled.not_blank == (0,) and filled.absent == ()
    assert shape("answer_only", "user", "system", "assistant", "system") == Shape(
        ("<s>", "\n\n", "<User>", "<Assistant>", "<end><Assistant><think>\n"),
        (1, 3, 0, 2),
        (0, 0, 0, 0),
        ((2, "</think>"),),
        (),
    )
    visible = shape("visible", "user", "assistant", "user")
    assert visible is not None and visible.not_blank == (1,) and visible.absent == ((1, "</think>"),)


ENVIRONMENT = template_environment()
FILTERS = st.one_of(
    st.sampled_from(sorted(ENVIRONMENT.filters)),
    st.sampled_from(["trim", "default('')", "string", "first", "list"]),
)
METHODS = st.one_of(
    st.sampled_from(sorted(name for name in {*dir(str), *dir(list), *dir(dict)} if not name.startswith("_"))),
    st.sampled_from(["strip", "lstrip", "rstrip", "split", "startswith", "endswith"]),
)
TESTS = st.sampled_from(sorted(name for name in ENVIRONMENT.tests if name.isalpha()))
OPERATORS = st.sampled_from(["+", "~", "*", "%", "==", "!=", "<", "in", "not in", "and", "or"])
VALUES = st.one_of(
    st.sampled_from(["m.content", "m['content']", "messages[0].content"]),
    st.sampled_from(
        ["m.role", "m", "' '", "'a'", "''", "'x\n'", "'%s'", "none", "0", "1", "true", "loop", "missing"]
    ),
)


def _of_others(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds("({} {} {})".format, inner, OPERATORS, inner),
        st.builds("({} ~ {})".format, inner, inner),
        st.builds("({} + {})".format, inner, inner),
        st.builds("({})|{}".format, inner, FILTERS),
        st.builds("({})|trim".format, inner),
        st.builds("({}).{}()".format, inner, METHODS),
        st.builds("({}).{}({})".format, inner, METHODS, inner),
        st.builds("({})[{}]".format, inner, inner),
        st.builds("(({}) is {})".format, inner, TESTS),
        st.builds("(({}) is {} ({}))".format, inner, TESTS, inner),
        st.builds("({} if {} else {})".format, inner, inner, inner),
        st.builds("said({})".format, inner),
        st.builds("[{}, {}]".format, inner, inner),
        st.builds("{{'a': {}}}".format, inner),
    )


EXPRESSIONS = st.recursive(VALUES, _of_others, max_leaves=4)
STATEMENTS = st.one_of(
    st.builds("{{{{ {} }}}}".format, EXPRESSIONS),
    st.builds("{{% if {} %}}{{{{ {} }}}}{{% else %}}no{{% endif %}}".format, EXPRESSIONS, EXPRESSIONS),
    st.builds(
        "{{% set x %}} {{{{ {} }}}}\n{{% endset %}}{{{{ x | trim }}}}{{{{ x.lstrip() }}}}".format, EXPRESSIONS
    ),
    st.builds("{{% for each in {} %}}{{{{ each }}}}{{% endfor %}}".format, EXPRESSIONS),
    st.builds("{{% filter {} %}}{{{{ {} }}}} {{% endfilter %}}".format, FILTERS, EXPRESSIONS),
    st.builds("{{% set ns.x = {} %}}{{{{ ns.x }}}}".format, EXPRESSIONS),
)


@settings(max_examples=500)
@given(
    body=st.lists(STATEMENTS, min_size=1, max_size=2).map("".join),
    contents=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=4),
)
def test_any_template(body: str, contents: list[tuple[str, str]]) -> None:
    source = (
        "{% macro said(x) %}[{{ x }}]{{ x | trim }}{% endmacro %}{% set ns = namespace(x='') %}"
        + of_each(body)
        + "{{ ns.x }}"
    )
    try:
        both(source)
    except ValueError:
        return
    for texts in contents:
        check(source, ("user", "assistant"), texts)
