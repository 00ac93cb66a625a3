"""Token ids of text by its words, for tokenizers that merge the bytes of every word on its own.

Byte-level BPE, as in the tokenizers of Llama, Qwen, gpt-oss, Mistral and DeepSeek, cuts a text into words by a
regular expression and merges each of them without a look at its neighbours. So a word has the same tokens wherever
it stands, and text is mostly words that were met before: a compiled kernel cuts the text, looks them up, and merges
those that are new.
"""

from router.word_tokens.tokenizer import MOST_PASSES, WordTokens, word_tokens_of
from router.word_tokens.words import UnfitError

__all__ = ["MOST_PASSES", "UnfitError", "WordTokens", "word_tokens_of"]
