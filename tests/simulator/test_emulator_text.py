"""The emulated model's words: tokenizer, chat template, and answers that can be sent back."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from simulator.emulator.generation import SamplingLimits, Writer
from simulator.emulator.tokens import TOKENIZER_FOLDER, ChatTokenizer, TemplateError

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_tokenizer.py"
TOKENIZER = ChatTokenizer()
WRITER = Writer(TOKENIZER)
PROMPTS = st.lists(st.integers(0, 4098), min_size=1, max_size=50)
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["celsius", "kelvin"]},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "places": {"type": "array", "items": {"type": "number"}},
        "nested": {"type": "object", "properties": {"a": {"type": ["null", "string"]}}},
    },
}


def test_the_shipped_files_are_small_and_come_from_the_script() -> None:
    script = runpy.run_path(str(SCRIPT))
    config = json.loads((TOKENIZER_FOLDER / "tokenizer_config.json").read_text())
    assert config["chat_template"] == script["CHAT_TEMPLATE"]
    assert (TOKENIZER_FOLDER / "tokenizer.json").stat().st_size < 300_000
    assert TOKENIZER.vocabulary_size == script["VOCABULARY_SIZE"] + len(script["SPECIAL_TOKENS"])


@pytest.mark.extended
def test_the_script_trains_a_tokenizer_that_gives_text_back() -> None:
    trained: Tokenizer = runpy.run_path(str(SCRIPT))["train"]()
    text = "<|im_start|>user\nGrüße, 世界! def f(x):\n\treturn x<|im_end|>\n"
    assert trained.decode(trained.encode(text).ids, skip_special_tokens=False) == text


@given(st.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_a_conversation_in_chat_markup() -> None:
    text = TOKENIZER.render(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello <b>"}]
    )
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello <b><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert TOKENIZER.encode(text)[0] == TOKENIZER.encode("<|im_start|>")[0]


def test_text_parts_are_joined_and_others_refused() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "one\ntwo<|im_end|>" in TOKENIZER.render([{"role": "user", "content": parts}])
    image = [{"type": "image_url", "image_url": {"url": "data:"}}]
    with pytest.raises(TemplateError, match="'image_url' are not supported"):
        TOKENIZER.render([{"role": "user", "content": image}])


def test_tools_are_rendered_into_the_prompt() -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
    text = TOKENIZER.render([{"role": "system", "content": "S"}, {"role": "user", "content": "U"}], [tool])
    assert text.startswith("<|im_start|>system\nS\n\nYou may call")
    # As vLLM hands it to the template: with the fields that the client left out.
    function = {"name": "weather", "description": None, "parameters": WEATHER}
    assert json.dumps({"type": "function", "function": function}) in text
    assert text.count("<|im_start|>system") == 1


def test_a_template_that_fails_says_why() -> None:
    with pytest.raises(TemplateError, match="chat template refused"):
        TOKENIZER.render([{"content": "a message without a role"}])
    calls = [{"type": "function", "function": {"name": "f", "arguments": "{broken"}}]
    with pytest.raises(TemplateError, match="not JSON"):
        TOKENIZER.render([{"role": "assistant", "tool_calls": calls}])


@given(PROMPTS, st.integers(0, 3))
def test_answers_end_by_themselves(prompt: list[int], choice: int) -> None:
    answer = WRITER.answer(prompt, choice, SamplingLimits(1000))
    assert answer.finish_reason == "stop"
    assert 32 <= len(answer.tokens) <= 160
    assert answer.tokens[-1] == TOKENIZER.eos_id
    assert answer == WRITER.answer(prompt, choice, SamplingLimits(1000))


@given(PROMPTS, st.integers(1, 31))
def test_a_limit_gives_a_prefix(prompt: list[int], max_tokens: int) -> None:
    whole = WRITER.answer(prompt, 0, SamplingLimits(1000))
    cut = WRITER.answer(prompt, 0, SamplingLimits(max_tokens))
    assert cut.finish_reason == "length"
    assert cut.tokens == whole.tokens[:max_tokens]
    endless = WRITER.answer(prompt, 0, SamplingLimits(500, ignore_eos=True))
    assert (len(endless.tokens), endless.finish_reason) == (500, "length")
    assert endless.text.startswith(whole.text)
    longer = WRITER.answer(prompt, 0, SamplingLimits(1000, min_tokens=200))
    assert len(longer.tokens) > 200


@settings(deadline=None)
@given(PROMPTS, st.lists(st.text(min_size=1, max_size=30), min_size=1, max_size=3))
def test_the_next_turn_extends_prompt_and_answer(seed: list[int], texts: list[str]) -> None:
    messages = [{"role": "user", "content": text} for text in texts]
    prompt = TOKENIZER.encode(TOKENIZER.render(messages))
    answer = WRITER.answer(prompt, len(seed), SamplingLimits(1000))
    following = [*messages, {"role": "assistant", "content": answer.text}, {"role": "user", "content": "?"}]
    next_prompt = TOKENIZER.encode(TOKENIZER.render(following))
    whole = [*prompt, *answer.tokens]
    assert next_prompt[: len(whole)] == whole


@given(PROMPTS)
def test_a_tool_call_follows_its_schema_and_can_be_sent_back(seed: list[int]) -> None:
    messages = [{"role": "user", "content": f"weather {seed}"}]
    prompt = TOKENIZER.encode(TOKENIZER.render(messages))
    answer = WRITER.tool_answer(prompt, 0, SamplingLimits(1000), "weather", WEATHER)
    call = answer.tool_call
    assert call is not None and answer.finish_reason == "tool_calls"
    arguments = json.loads(call.arguments)
    assert set(arguments) == set(WEATHER["properties"])
    assert arguments["unit"] in ("celsius", "kelvin")
    assert isinstance(arguments["days"], int) and isinstance(arguments["exact"], bool)
    function = {"name": call.name, "arguments": call.arguments}
    turn = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    whole = [*prompt, *answer.tokens]
    assert TOKENIZER.encode(TOKENIZER.render([*messages, turn]))[: len(whole)] == whole


def test_a_tool_call_with_wide_characters_and_a_limit() -> None:
    schema = {"type": "object", "properties": {"größe": {"enum": ["世界🎉"]}}}
    whole = WRITER.tool_answer([1], 0, SamplingLimits(1000), "f", schema)
    assert whole.tool_call is not None
    assert json.loads(whole.tool_call.arguments) == {"größe": "世界🎉"}
    cut = WRITER.tool_answer([1], 0, SamplingLimits(len(whole.tokens) - 8), "f", schema)
    assert cut.tool_call is not None and cut.finish_reason == "length"
    assert whole.tool_call.arguments.startswith(cut.tool_call.arguments)


def test_a_stop_string_ends_the_text_before_it() -> None:
    whole = WRITER.answer([1, 2, 3], 0, SamplingLimits(1000))
    third = whole.pieces[2]
    stop = third[2:] + whole.pieces[3][:2]  # across two tokens
    cut = WRITER.answer([1, 2, 3], 0, SamplingLimits(1000, stop=("never", stop)))
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.tokens == whole.tokens[:4]
    assert cut.text == "".join(whole.pieces[:2]) + third[:2]
    kept = WRITER.answer([1, 2, 3], 0, SamplingLimits(1000, min_tokens=30, stop=(whole.pieces[0],)))
    assert len(kept.tokens) > 30


def test_a_tokenizer_without_its_end_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text((TOKENIZER_FOLDER / "tokenizer.json").read_text())
    config = {"eos_token": {"content": "<nowhere>"}, "chat_template": ""}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="no token '<nowhere>'"):
        ChatTokenizer(tmp_path)
