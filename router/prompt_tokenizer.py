"""A model's tokenizer and chat template, read from a folder as Hugging Face lays it out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from conductor.placement import Tokens
from router.chat_template import ChatTemplate
from router.errors import TokenizationError
from router.inference import Endpoint, InferenceRequest, first_prompt

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class PromptTokenizer:
    """Token ids of prompts, as the engine computes them. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate | None = None) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template

    @classmethod
    def from_folder(cls, folder: Path | str) -> PromptTokenizer:
        """Read ``tokenizer.json`` and the template of ``tokenizer_config.json`` or ``chat_template.jinja``.

        Raises FileNotFoundError or ValueError when the folder does not hold a usable tokenizer.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist: give the folder of a model's tokenizer files")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise ValueError(f"{path} cannot be read: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config_path = folder / "tokenizer_config.json"
        config = json.loads(config_path.read_text("utf-8")) if config_path.is_file() else {}
        template_path = folder / "chat_template.jinja"
        source = template_path.read_text("utf-8") if template_path.is_file() else _template_source(config)
        template = ChatTemplate(source, _special_tokens(config)) if source is not None else None
        return cls(tokenizer, template)

    def tokens(self, request: InferenceRequest) -> Tokens:
        """The prompt's token ids; of a batch, the first prompt's. Raises TokenizationError."""
        document = request.document
        if request.endpoint is Endpoint.CHAT:
            if self._chat_template is None:
                raise TokenizationError("the tokenizer has no chat template")
            if document.get("chat_template"):
                raise TokenizationError("the request brings its own chat template")
            text = self._chat_template.render(document)
        else:
            text = first_prompt(document.get("prompt"))
            if not isinstance(text, str):
                raise TokenizationError("the prompt is not text")
        special = document.get("add_special_tokens")
        if special is None:
            special = request.endpoint is Endpoint.COMPLETIONS  # a chat template writes them itself
        tokens = self.encode(text, add_special_tokens=bool(special))
        kept = document.get("truncate_prompt_tokens")
        return tokens[-kept:] if isinstance(kept, int) and 0 < kept < len(tokens) else tokens

    def encode(self, text: str, *, add_special_tokens: bool) -> Tokens:
        try:  # the batch call leaves the GIL to others and computes no character offsets
            encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except Exception as error:  # tokenizers raises plain Exception; lone surrogates: UnicodeEncodeError
            raise TokenizationError(f"the tokenizer failed: {error}") from error
        return np.array(encoding.ids, dtype=np.uint32)


def _template_source(config: dict[str, Any]) -> str | None:
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _SPECIAL_TOKENS:
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            tokens[name] = token
    return tokens
