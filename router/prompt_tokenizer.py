"""A model's tokenizer and chat template, read from a folder as Hugging Face lays it out."""

from __future__ import annotations

import contextlib
import json
import os
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from conductor.placement import Tokens
from router.chat_template import ChatTemplate
from router.errors import TokenizationError
from router.inference import Endpoint, InferenceRequest, first_prompt, truncated
from router.segments import IndivisibleError, Segmentation, segmentation_of
from router.token_cache import TokenCache, TokenCacheState

if TYPE_CHECKING:
    from router.plain_chats import PlainPrompts
    from router.word_tokens import WordTokens

os.environ.setdefault(
    "TOKENIZERS_PARALLELISM", "false"
)  # for one short text, its threads take longer than it does

CACHE_BYTES = 256 * 1024 * 1024  # about 600 conversations of 128 KB
_BY_WORDS_FACTOR = 8  # of new text about so much is tokenized by its words in the time that the library takes
_ROLES = ("user", "assistant", "user", "assistant", "user")
_PROBE = [{"role": role, "content": f"{role}-{number}"} for number, role in enumerate(_ROLES)]
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class PromptTokenizer:
    """Token ids of prompts, as the engine computes them. Thread-safe.

    The tokens of up to ``cache_bytes`` of text are kept (0: none), so that a conversation's turns are tokenized
    once. The ``tokenizer`` must not be changed afterwards. ``plain`` is for chats that need not be parsed, where
    its tokens are those of words.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None = None,
        *,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._cache: TokenCache | None = None
        self._cache_off: str | None = "it may keep 0 bytes"
        self._affixes: tuple[Tokens, Tokens] | None = None
        self._words: WordTokens | None = None
        self.plain: PlainPrompts | None = None
        if cache_bytes > 0:
            try:
                segmentation = segmentation_of(tokenizer, lambda text: self._encode(text, False))
                self._cache = TokenCache(
                    segmentation,
                    self._encode_plain,
                    cache_bytes,
                    by_separator=_by_separator(tokenizer, segmentation, chat_template),
                )
                self._cache_off = None
                self._affixes = _affixes(self._encode)
            except (IndivisibleError, TokenizationError) as error:
                self._cache_off = str(error)
            else:
                # Only who tokenizes needs a compiler's runtime.
                from router.plain_chats import PlainPrompts
                from router.word_tokens import UnfitError, word_tokens_of

                with contextlib.suppress(UnfitError):
                    self._words = word_tokens_of(tokenizer, segmentation)
                    if chat_template is not None:
                        self.plain = PlainPrompts(chat_template, segmentation, self._words)

    @classmethod
    def from_folder(cls, folder: Path | str, *, cache_bytes: int = CACHE_BYTES) -> PromptTokenizer:
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
        return cls(tokenizer, template, cache_bytes=cache_bytes)

    def tokens(self, request: InferenceRequest) -> Tokens:
        """The prompt's token ids; of a batch, the first prompt's. Raises TokenizationError."""
        tokens = self._tokens(request, None)
        assert tokens is not None
        return tokens

    def tokens_if_known(self, request: InferenceRequest, most_new: int) -> Tokens | None:
        """As :meth:`tokens`; None when it would take longer than the library needs for ``most_new`` characters."""
        return self._tokens(request, most_new)

    def encode(self, text: str, *, add_special_tokens: bool) -> Tokens:
        """Raises TokenizationError."""
        tokens = self._cached(text, add_special_tokens, None)
        assert tokens is not None
        return tokens

    def cache_state(self) -> TokenCacheState:
        if self._cache is None:
            return TokenCacheState(self._cache_off)
        state, plain = self._cache.state(), self.plain
        if plain is None:
            return state
        return TokenCacheState(
            None,
            state.kept_bytes + plain.kept_bytes,
            state.known_characters + plain.known_characters,
            state.new_characters + plain.new_characters,
        )

    def _tokens(self, request: InferenceRequest, most_new: int | None) -> Tokens | None:
        document = request.document
        if request.endpoint is Endpoint.CHAT:
            text = self._rendered(document)
        else:
            text = first_prompt(document.get("prompt"))
            if not isinstance(text, str):
                raise TokenizationError("the prompt is not text")
        special = document.get("add_special_tokens")
        if special is None:
            special = request.endpoint is Endpoint.COMPLETIONS  # a chat template writes them itself
        tokens = self._cached(text, bool(special), most_new)
        return None if tokens is None else truncated(tokens, document)

    def _rendered(self, document: dict[str, Any]) -> str:
        if self._chat_template is None:
            raise TokenizationError("the tokenizer has no chat template")
        arguments = document.get("chat_template_kwargs")
        brought = arguments.get("chat_template") if isinstance(arguments, dict) else None
        if document.get("chat_template") or brought:
            raise TokenizationError("the request brings its own chat template")
        return self._chat_template.render(document)

    def _cached(self, text: str, special: bool, most_new: int | None) -> Tokens | None:
        if self._cache is None or (special and self._affixes is None):
            if most_new is not None and len(text) > most_new:
                return None
            return self._encode(text, special)
        if most_new is not None and self._words is not None:
            most_new *= _BY_WORDS_FACTOR
        tokens = self._cache.tokens(text, most_new=most_new)
        if tokens is None or not special or self._affixes is None:
            return tokens
        return np.concatenate((self._affixes[0], tokens, self._affixes[1]))

    def _encode_plain(self, text: str, most_new: int | None) -> Tokens | None:
        if self._words is not None:
            if most_new is not None:
                most_new //= _BY_WORDS_FACTOR
            tokens = self._words.tokens(text)
            if tokens is not None:
                return tokens
        return None if most_new is not None and len(text) > most_new else self._encode(text, False)

    def _encode(self, text: str, special: bool) -> Tokens:
        try:  # the batch call leaves the GIL to others and computes no character offsets
            encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0]
        except (
            BaseException
        ) as error:  # tokenizers raises plain Exception; lone surrogates: UnicodeEncodeError
            if not (isinstance(error, Exception) or type(error).__name__ == "PanicException"):
                raise  # what panics in its Rust code is a BaseException
            raise TokenizationError(f"the tokenizer failed: {error}") from error
        return np.frombuffer(array("I", encoding.ids), np.uint32)  # np.array takes twice as long


def _by_separator(
    tokenizer: Tokenizer, segmentation: Segmentation, template: ChatTemplate | None
) -> Segmentation | None:
    """Split where chats of the template have one and the same token most often, so that turns stay whole.

    Behind the last of them stands nothing that was said: else the piece grew with the answer, and what was said
    would be tokenized once more with the next turn. None where there is no such token.
    """
    if template is None or not segmentation.separators:
        return None
    try:
        text = template.render({"messages": _PROBE})
    except TokenizationError:
        return None
    end = text.rfind(_PROBE[-1]["content"])
    by_place = sorted(segmentation.separators, key=text.find)
    choices = [token for token in by_place if text.rfind(token) > end >= 0]
    separator = max(choices, key=text.count, default=None)
    if separator is None or text.count(separator) < len(_PROBE) // 2:
        return None
    token = tokenizer.token_to_id(separator)
    return None if token is None else segmentation.by(separator, token)


def _affixes(encode: Callable[[str, bool], Tokens]) -> tuple[Tokens, Tokens] | None:
    """What a tokenizer puts in front of a text and behind it; None when that cannot be told."""
    found = set()
    for text in ("a", "b c d"):
        plain, dressed = encode(text, False).tolist(), encode(text, True).tolist()
        places = [at for at in range(len(dressed) - len(plain) + 1) if dressed[at : at + len(plain)] == plain]
        if len(places) != 1:
            return None
        found.add((tuple(dressed[: places[0]]), tuple(dressed[places[0] + len(plain) :])))
    if len(found) != 1:
        return None
    before, behind = found.pop()
    return np.array(before, np.uint32), np.array(behind, np.uint32)


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
