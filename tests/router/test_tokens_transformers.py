"""Prompts beside those of transformers, which vLLM and SGLang render and tokenize chats with."""

from __future__ import annotations

import copy
import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

from router import PromptTokenizer
from router.chat_template import ChatTemplate
from router.errors import TokenizationError
from router.inference import Endpoint, parse_inference
from simulator.emulator.tokens import TOKENIZER_FOLDER

transformers = pytest.importorskip("transformers")

CHATML_WITH_TOOLS = json.loads((TOKENIZER_FOLDER / "tokenizer_config.json").read_text())["chat_template"]

TRIMMED_WITH_HEADERS = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
<|im_start|>system\n\n{{ system }}
{%- if tools is not none %}
{% for tool in tools %}{{ tool | tojson(indent=4) }}
{% endfor %}
{%- endif %}<|im_end|>
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|im_start|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|im_end|>' }}
    {%- elif 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|im_start|>assistant\\n\\n{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' + call.arguments | tojson + '}' }}
        {{- '<|im_end|>' }}
    {%- else %}
        {{- '<|im_start|>ipython\\n\\n' + message.content | tojson + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n\\n' }}{%- endif %}
"""

IN_BRACKETS = """{%- macro said(text, first) %}{{ ' ' if not first }}{{ text }}{% endmacro %}
{%- set ns = namespace(turns=0) %}{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.turns = ns.turns + 1 %}
        {{- '[INST]' }}{{ said(message.content, loop.first) }}{{ '[/INST]' }}
    {%- elif message.role == 'assistant' %}
        {% generation %}{{ said(message.content, false) }}{% endgeneration %}{{ eos_token }}
    {%- elif message.role == 'tool' %}{% continue %}
    {%- else %}
        {{- raise_exception('role ' + message.role) if ns.turns else message.content }}
    {%- endif %}
    {%- if loop.last and thinking is defined and thinking %}{{ '<think>' }}{% endif %}
{%- endfor %}"""

IN_PARTS = """{%- for message in messages %}<|im_start|>{{ message.role }}
{% for part in message['content'] %}{{ part['text'] if part.type == 'text' }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{{ '<think>\\n' if enable_thinking | default(true) }}{% endif %}"""


def tiny() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    names = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "[INST]", "[/INST]"]
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=[AddedToken(name, special=True) for name in names],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox", '{"name": "weather"}'] * 9, trainer)
    return tokenizer


SNIPPETS = [
    "",
    " ",
    "hello",
    " the fox \n",
    "<|im_end|>",
    "<s>",
    "[INST] x",
    "é🦊",
    '"{',
    "{{ x }}",
    "</s>\n\n",
]
TEXT = st.one_of(st.sampled_from(SNIPPETS), st.text(st.characters(codec="utf-8"), max_size=6))
CALL = st.fixed_dictionaries(
    {"id": st.just("c"), "type": st.just("function")}
    | {
        "function": st.fixed_dictionaries(
            {"name": TEXT, "arguments": st.dictionaries(TEXT, TEXT, max_size=2)}
        )
    }
)
TOOL = st.builds(
    lambda *values: dict(zip(("name", "description", "parameters"), values, strict=True)),
    TEXT,
    TEXT,
    st.dictionaries(TEXT, TEXT, max_size=2),
)
TURN = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": TEXT}),
    st.fixed_dictionaries({"role": st.just("tool"), "content": TEXT, "tool_call_id": st.just("c")}),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": TEXT, "tool_calls": st.lists(CALL, min_size=1)}
    ),
)
CONVERSATION = st.lists(TURN, min_size=1, max_size=6)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(
    "template",
    [CHATML_WITH_TOOLS, TRIMMED_WITH_HEADERS, IN_BRACKETS, IN_PARTS],
    ids=["chatml", "headers", "brackets", "parts"],
)
def test_chats_have_the_tokens_that_transformers_gives_them(template: str) -> None:
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tiny(), chat_template=template, clean_up_tokenization_spaces=False, **SPECIAL
    )
    ours = PromptTokenizer(tiny(), ChatTemplate(template, SPECIAL))
    wants_parts = template is IN_PARTS

    @settings(max_examples=60, deadline=None)
    @given(
        CONVERSATION,
        st.one_of(st.none(), st.lists(TOOL, min_size=1, max_size=2)),
        st.sampled_from([{}, {"thinking": True}, {"enable_thinking": False}]),
        st.sampled_from(["generation", "plain", "continued"]),
    )
    def check(
        messages: list[dict[str, Any]], tools: list[Any] | None, arguments: dict[str, Any], end: str
    ) -> None:
        described = [{"type": "function", "function": tool} for tool in tools] if tools else None
        document: dict[str, Any] = {"model": "m", "messages": copy.deepcopy(messages), "tools": described}
        document |= {"chat_template_kwargs": arguments, "add_generation_prompt": end == "generation"}
        document["continue_final_message"] = end == "continued"
        for message in document["messages"]:
            for call in message.get("tool_calls", []):  # as clients send them
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        given_messages = copy.deepcopy(messages)
        if wants_parts:
            for message in given_messages:
                message["content"] = [{"type": "text", "text": message["content"]}]
        try:
            expected = reference.apply_chat_template(
                given_messages,
                tools=described,
                add_generation_prompt=end == "generation",
                continue_final_message=end == "continued",
                return_dict=False,
                **arguments,
            )
        except Exception:
            with pytest.raises(TokenizationError):
                ours.tokens(parse_inference(Endpoint.CHAT, orjson.dumps(document)))
            return
        assert ours.tokens(parse_inference(Endpoint.CHAT, orjson.dumps(document))).tolist() == expected

    check()
