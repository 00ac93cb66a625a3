"""Chats that are read, rendered and tokenized by compiled code, from the body's bytes.

Most chats are messages of a role and a text each. What a template makes of such a chat depends on the contents only
in that it writes them (`router.template_shapes` finds that out), so that the prompt's text can be put together by
copying; and where the tokenizer cuts text into words (`router.word_tokens`), its tokens are looked up. Every other
body is parsed, rendered and tokenized by the libraries, and the outcome is the same.
"""

from router.plain_chats.prompts import PlainPrompts
from router.plain_chats.reader import PlainChat, PlainChats

__all__ = ["PlainChat", "PlainChats", "PlainPrompts"]
