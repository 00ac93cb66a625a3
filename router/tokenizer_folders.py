"""The tokenizers of the configured models, read from their folders."""

from __future__ import annotations

from collections.abc import Mapping

from router.prompt_tokenizer import PromptTokenizer


def load_tokenizers(folders: Mapping[str, str], *, cache_bytes: int) -> dict[str, PromptTokenizer]:
    """By the names of ``folders``; names with one folder share its tokenizer.

    Raises ValueError naming the model whose tokenizer cannot be loaded.
    """
    loaded: dict[str, PromptTokenizer] = {}
    for name, folder in folders.items():
        if folder not in loaded:
            try:
                loaded[folder] = PromptTokenizer.from_folder(folder, cache_bytes=cache_bytes)
            except (OSError, ValueError) as error:
                raise ValueError(f"the tokenizer of {name!r} cannot be loaded: {error}") from None
    return {name: loaded[folder] for name, folder in folders.items()}
