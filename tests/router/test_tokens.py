"""Token ids for placement: chat templates, tokenizers, engines, and what happens when they fail."""

from __future__ import annotations

import asyncio
import copy
import json
import re
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from jinja2 import UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from conductor.placement import TokenSource
from router import EngineTokenizer, PromptTokenizer, RouterMetrics, TokenService
from router.chat_template import ChatTemplate
from router.inference import Endpoint, parse_inference
from router.template_environment import template_environment
from router.tokens import TokenizationError

CHATML = """{%- if tools %}
    {{- '<|im_start|>system\\nTools:' }}
    {%- for tool in tools %}
        {{- '\\n' + tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
    {%- for call in message.tool_calls or [] %}
        {{- call.function.name + '(' + call.function.arguments.city + ')\\n' }}
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if thinking is defined and not thinking %}{{- '<think></think>' }}{%- endif %}
{%- endif %}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small byte-level BPE tokenizer that puts <s> in front of plain prompts."""
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(token, special=True) for token in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 20, trainer)
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"chat_template": CHATML, "bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def chat(**fields: Any) -> Any:
    document = {"model": "m", "messages": [{"role": "user", "content": "the fox"}], **fields}
    return parse_inference(Endpoint.CHAT, orjson.dumps(document))


def completion(prompt: Any, **fields: Any) -> Any:
    return parse_inference(Endpoint.COMPLETIONS, orjson.dumps({"model": "m", "prompt": prompt, **fields}))


def rendered(template: str = CHATML, **fields: Any) -> str:
    return ChatTemplate(template, {"bos_token": "<s>"}).render(chat(**fields).document)


def test_chat_template_is_rendered_as_engines_do() -> None:
    assert rendered() == "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n"
    assert rendered(add_generation_prompt=False) == "<|im_start|>user\nthe fox<|im_end|>\n"
    assert rendered(chat_template_kwargs={"thinking": False}).endswith("assistant\n<think></think>")
    tool = {"type": "function", "function": {"name": "weather", "description": "<é>"}}
    shown = '{"type": "function", "function": {"name": "weather", "description": "<é>", "parameters": null}}'
    assert rendered(tools=[tool]).startswith(f"<|im_start|>system\nTools:\n{shown}<|im_end|>\n")
    assert rendered(tools=[tool], tool_choice="none") == rendered(tools=[tool])
    mixed = {"function": {"strict": True, "description": "<é>", "name": "weather"}, "type": "function"}
    assert shown.replace("null", 'null, "strict": true') in rendered(tools=[mixed])


def test_messages_are_prepared_as_vllm_does() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "user\none\ntwo<" in rendered(messages=[{"role": "user", "content": parts}])
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "x"},
    ]
    assert rendered(messages=messages).startswith(
        "<|im_start|>assistant\n<|im_end|>\nweather(Oslo)\n<|im_start|>"
    )
    openai_style = (
        "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
    )
    assert rendered(openai_style, messages=[{"role": "user", "content": parts}]) == "[one][two]"
    assert rendered(openai_style) == "[the fox]"
    several = [{"type": "refusal", "refusal": "no"}, "plain", {"type": "text", "text": None}]
    assert "user\nno\nplain<" in rendered(messages=[{"role": "user", "content": several}])
    fields = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
    said = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": [], "reasoning_content": "r"}
    assert rendered(fields, messages=[said]) == (
        '{"role": "assistant", "content": "x", "reasoning": "r", "reasoning_content": "r"}'
    )
    answer = {"role": "tool", "content": "x", "tool_call_id": "1", "name": "weather", "other": 1}
    assert rendered(fields, messages=[answer]) == (
        '{"role": "tool", "content": "x", "tool_call_id": "1", "name": "weather"}'
    )


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "unheard_of", None])
def test_other_parts_than_text_are_left_to_the_engine(kind: str | None) -> None:
    part = {"type": kind, str(kind): {"url": "data:,"}}
    with pytest.raises(TokenizationError, match=f"{kind!r} is not text"):
        rendered(messages=[{"role": "user", "content": [{"type": "text", "text": "see"}, part]}])


@pytest.mark.parametrize(
    "odd",
    [
        {"messages": [{"role": "user", "content": 5}]},
        {"tools": ["weather"]},
        {"tools": 5},
        {"chat_template_kwargs": [1]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
        {"messages": [{"role": "assistant", "tool_calls": 7}]},
        {"messages": [{"role": "user", "content": []}], "continue_final_message": True},
    ],
)
def test_odd_requests_cannot_be_rendered(odd: dict[str, Any]) -> None:
    parts = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    with pytest.raises(TokenizationError):
        rendered(parts, **odd)


def test_final_message_is_continued() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "so far "}]
    text = rendered(messages=messages, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nso far ")
    trimming = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    assert rendered(trimming, messages=messages, continue_final_message=True) == "[a][so far"
    messages[1]["content"] = ""
    assert rendered(messages=messages, continue_final_message=True).endswith("<|im_start|>assistant\n")
    messages[1]["content"] = "a"  # shown again behind itself
    text = rendered(
        "{{ messages[1].content }}b{{ messages[0].content }}", messages=messages, continue_final_message=True
    )
    assert text == "a"
    with pytest.raises(TokenizationError, match="as it is"):
        rendered("{{ messages[0].content }}", messages=messages, continue_final_message=True)


def test_template_functions() -> None:
    assert rendered("{{ strftime_now('%Y') }}").isdigit()
    assert rendered("{% generation %}said{% endgeneration %}!") == "said!"
    assert (
        rendered("{{ bos_token }}{{ {'b': 1, 'a': 2} | tojson(indent=1) }}") == '<s>{\n "b": 1,\n "a": 2\n}'
    )
    with pytest.raises(TokenizationError, match="roles must alternate"):
        rendered("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TokenizationError):
        rendered("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ValueError, match="not valid"):
        ChatTemplate("{% for %}", {})


def test_templates_read_their_loops_and_namespaces() -> None:
    template = (
        "{% set ns = namespace(said=0) %}{% for message in messages %}{{ loop.index }}{{ loop.last }}"
        "{% set ns.said = ns.said + 1 %}{{ loop.cycle('a', 'b') }}{{ loop.nextitem is defined }};{% endfor %}"
        "{{ ns.said }}{{ ns.missing is defined }}"
    )
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    assert rendered(template, messages=turns) == "1FalseaTrue;2TruebFalse;2False"


READS = """{% set ns = namespace(m=messages[0]) %}{% macro shown(m) %}{{ m.content }}{{ m['name'] }}{% endmacro %}
{%- for m in messages if m.role == 'user' and not m.hidden %}{{ m.items }}{{ m['items'] }}{{ shown(m) }}
{%- if m.name or m['none'] and not (m.odd or m).deeper %}named{% elif m.missing %}never{% else %}nameless{% endif %}
{{- 'a' if m.name else 'b' }}{{ m.missing is defined }}{{ m.missing | default(m.role) }}{{ m.missing }}
{{- ns.m.role }}{{ m.tool_calls[0].function }}{{ loop.index }}{{ m.missing == none }}
{%- endfor %}"""


def test_reading_dictionaries_gives_what_jinja_gives() -> None:
    """Whether the keys are there or not, have names of attributes, or hold what is not a dictionary."""
    messages = [
        {
            "role": "user",
            "content": "x",
            "name": "",
            "tool_calls": [{"function": {"name": "f"}}],
            "odd": {"deeper": 0},
        },
        {"role": "user", "content": "y", "name": "n", "tool_calls": "text", "hidden": []},
        {"role": "user", "content": None, "hidden": True},
        {"role": "tool"},
    ]
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    ours = template_environment()
    for shown in (messages[:1], messages[1:], messages):
        texts = []
        for environment in (plain, ours):
            text = environment.from_string(READS).render(messages=shown)
            texts.append(re.sub(r"<built-in method items of dict object at \w+>", "method", text))
        assert texts[0] == texts[1]
        assert "named" in texts[0] or "nameless" in texts[0]
    for failing in ("{{ messages[0].missing.deeper }}", "{% if messages.missing.deeper %}{% endif %}"):
        for environment in (plain, ours):
            with pytest.raises(UndefinedError, match="has no attribute 'missing'"):
                environment.from_string(failing).render(messages=messages)


def test_rendering_leaves_the_request_as_it_is() -> None:
    document = chat(
        messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ).document
    before = copy.deepcopy(document)
    ChatTemplate(CHATML, {}).render({**document, "continue_final_message": True})
    assert document == before
    reordered = [{"content": "x", "role": "user"}, {"role": "developer", "content": "y"}]
    shown = rendered("{% for m in messages %}{{ m | tojson }}{% endfor %}", messages=reordered)
    assert shown == '{"role": "user", "content": "x"}{"role": "developer", "content": "y", "tools": null}'


@pytest.mark.parametrize("name", ["__class__", "_Namespace__attrs"])
def test_what_templates_may_not_read(name: str) -> None:
    with pytest.raises(TokenizationError, match="unsafe"):
        rendered("{% set ns = namespace(a=1) %}{{ ns." + name + ".a }}")


def test_tokens_agree_with_the_tokenizer(folder: Path) -> None:
    oracle = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer = PromptTokenizer.from_folder(folder)
    tokens = tokenizer.tokens(chat())
    assert tokens.dtype == np.uint32
    text = "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n"
    assert tokens.tolist() == oracle.encode(text, add_special_tokens=False).ids
    plain = oracle.encode("the fox", add_special_tokens=True).ids
    assert tokenizer.tokens(completion("the fox")).tolist() == plain
    assert tokenizer.tokens(completion(["the fox", "x"])).tolist() == plain
    assert tokenizer.tokens(completion("the fox", add_special_tokens=False)).tolist() == plain[1:]
    assert tokenizer.tokens(completion("the fox", truncate_prompt_tokens=1)).tolist() == plain[-1:]


def test_unusable_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        PromptTokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be read"):
        PromptTokenizer.from_folder(tmp_path)


def test_chat_template_file_takes_precedence(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    tokenizer = PromptTokenizer.from_folder(tmp_path)
    with pytest.raises(TokenizationError, match="no chat template"):
        tokenizer.tokens(chat())
    named = [{"name": "default", "template": "the fox"}, {"name": "tool_use", "template": "x"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    by_name = PromptTokenizer.from_folder(tmp_path).tokens(chat())
    (tmp_path / "chat_template.jinja").write_text("the lazy dog")
    by_file = PromptTokenizer.from_folder(tmp_path).tokens(chat())
    assert len(by_name) and by_name.tolist() != by_file.tolist()


async def test_sources_of_tokens(folder: Path) -> None:
    tokenizer = PromptTokenizer.from_folder(folder)
    service = TokenService({"m": tokenizer}, in_thread_bytes=200)
    given = service.prompt_at_once(completion([5, 6, 4_294_967_295]))
    assert given is not None
    assert (given.source, given.tokens.tolist()) == (TokenSource.CLIENT, [5, 6, 4_294_967_295])
    batch = service.prompt_at_once(completion([[1, 2], [3]]))
    assert batch is not None and batch.tokens.tolist() == [1, 2]
    last = service.prompt_at_once(completion([5, 6, 7], truncate_prompt_tokens=2))
    assert last is not None and last.tokens.tolist() == [6, 7]
    short = service.prompt_at_once(chat())
    assert (
        short is not None and short.source is TokenSource.LOCAL and short.prompt_tokens == len(short.tokens)
    )
    assert short.fallback is None
    long_request = completion("the fox " * 500)
    assert service.prompt_at_once(long_request) is None
    in_thread = await service.prompt(long_request)
    assert in_thread.tokens.tolist() == tokenizer.tokens(long_request).tolist()
    known = service.prompt_at_once(long_request)
    assert known is not None and known.tokens.tolist() == in_thread.tokens.tolist()
    unknown = TokenService({}).prompt_at_once(chat())
    assert unknown is not None
    assert (unknown.source, len(unknown.tokens), unknown.prompt_tokens > 0) == (TokenSource.NONE, 0, True)
    anything = TokenService({"*": tokenizer}).prompt_at_once(chat())
    assert anything is not None and anything.source is TokenSource.LOCAL
    service.close()


@pytest.mark.parametrize("prompt", [[-1], [1, "a"], [2**32], [1.5, {}], [None]])
def test_bad_token_ids_degrade(prompt: Any) -> None:
    placed = TokenService().prompt_at_once(completion(prompt))
    assert placed is not None and placed.source is TokenSource.NONE


async def test_failing_template_degrades_and_is_counted(cluster: Any, folder: Path) -> None:
    engine = await cluster.engine()
    door = await cluster.door([engine])
    template = ChatTemplate("{{ raise_exception('no') }}", {})
    broken = PromptTokenizer(Tokenizer.from_file(str(folder / "tokenizer.json")), template)
    door.services.tokens = TokenService({"*": broken}, metrics=door.services.metrics)
    for _ in range(2):
        assert (await door.chat()).status_code == 200
    assert door.placements.asked[0].token_source is TokenSource.NONE
    assert door.placements.asked[0].token_fallback == "local: the chat template failed: no"
    assert door.sample("conductor_tokenization_failures_total", source="local") == 2
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    assert (await door.chat(messages=[{"role": "user", "content": image}])).status_code == 200


async def test_tokens_reach_the_placement(cluster: Any, folder: Path) -> None:
    tokenizer = PromptTokenizer.from_folder(folder)
    door = await cluster.door(
        [await cluster.engine()], tokens=TokenService({"*": tokenizer}, in_thread_bytes=500)
    )
    for text in ("the fox", "the lazy dog " * 100):
        messages = [{"role": "user", "content": text}]
        response = await door.client.post(
            "/v1/chat/completions", json={"model": cluster.MODEL, "messages": messages, "cache_salt": "s"}
        )
        assert response.status_code == 200
        asked = door.placements.asked[-1]
        assert asked.tokens.tolist() == tokenizer.tokens(chat(messages=messages)).tolist()
        assert (asked.prompt_tokens, asked.cache_salt) == (len(asked.tokens), "s")
    assert door.sample("conductor_token_source_total", source="local") == 2


async def test_engine_tokenizes_where_no_tokenizer_is_given(cluster: Any) -> None:
    async def respond(request: Any, writer: asyncio.StreamWriter) -> None:
        if "/tokenize" in request.request_line:
            writer.write(cluster.json_response(b'{"count":3,"max_model_len":10,"tokens":[7,8,9]}'))
        else:
            await engine.answer(request, writer)

    engine = await cluster.engine(respond=respond)
    urls: list[str | None] = [engine.target.url, None, f"http://127.0.0.1:{cluster.unused_port()}"]

    async def first_url(model: str) -> str | None:
        return urls[0]

    async with httpx.AsyncClient(trust_env=False) as client:
        service = TokenService(engine=EngineTokenizer(client, first_url))
        door = await cluster.door([engine], tokens=service)
        assert (await door.chat(tools=[], seed=1)).status_code == 200
        asked = door.placements.asked[0]
        assert (asked.token_source, asked.tokens.tolist()) == (TokenSource.ENGINE, [7, 8, 9])
        assert engine.received[0].document == {"messages": cluster.chat_document()["messages"], "tools": []}
        for why in ("no instance serves the model", "connect"):
            urls.pop(0)
            assert (await door.chat()).status_code == 200
            asked = door.placements.asked[-1]
            assert asked.token_source is TokenSource.NONE
            assert asked.token_fallback.startswith(
                "local: no tokenizer is configured for 'test/model'; engine: "
            )
            assert why in asked.token_fallback.casefold()


async def test_image_is_left_to_the_engine(cluster: Any, folder: Path) -> None:
    async def respond(request: Any, writer: asyncio.StreamWriter) -> None:
        if "/tokenize" in request.request_line:
            writer.write(cluster.json_response(b'{"tokens":[7,8,9]}'))
        else:
            await engine.answer(request, writer)

    engine = await cluster.engine(respond=respond)

    async def url(model: str) -> str:
        return str(engine.target.url)

    async with httpx.AsyncClient(trust_env=False) as client:
        tokens = TokenService(
            {"*": PromptTokenizer.from_folder(folder)},
            engine=EngineTokenizer(client, url),
        )
        door = await cluster.door([engine], tokens=tokens)
        image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
        messages = [{"role": "user", "content": image}]
        assert (await door.chat(messages=messages, truncate_prompt_tokens=2)).status_code == 200
        asked = door.placements.asked[0]
        assert (asked.token_source, asked.tokens.tolist()) == (TokenSource.ENGINE, [8, 9])
        assert asked.token_fallback == "local: content part of type 'image_url' is not text"


def test_token_caches_are_shown(folder: Path) -> None:
    metrics = RouterMetrics()
    registry = metrics.registry
    kept, off = PromptTokenizer.from_folder(folder), PromptTokenizer.from_folder(folder, cache_bytes=0)
    TokenService({"m": kept, "alias": kept, "other": off}, metrics=metrics)
    kept.tokens(chat())
    kept.tokens(chat())
    text = len(rendered())

    def sample(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"conductor_token_cache_{name}", labels)

    assert sample("enabled", model="m", off="") == 1
    assert sample("enabled", model="other", off="it may keep 0 bytes") == 0
    assert sample("enabled", model="alias", off="") is None
    assert sample("characters_total", model="m", tokens="new") == text
    assert sample("characters_total", model="m", tokens="known") == text
    assert (sample("bytes", model="m") or 0) > text


async def test_client_that_leaves_while_its_prompt_is_tokenized(cluster: Any) -> None:
    tokenizing, release = asyncio.Event(), asyncio.Event()

    class Slow(TokenService):
        def prompt_at_once(self, request: Any) -> Any:
            return None

        async def prompt(self, request: Any, *, plain: bool = False) -> Any:
            tokenizing.set()
            await release.wait()

    engine = await cluster.engine()
    door = await cluster.door([engine], tokens=Slow())
    connection = await door.connect()
    connection.send(cluster.post(orjson.dumps(cluster.chat_document())))
    await tokenizing.wait()
    await connection.close()
    await cluster.wait_until(lambda: door.sample("conductor_inflight_requests") == 0)
    assert not door.placements.asked and not engine.received
