"""The loops of chat templates over messages, of which only the turns of new messages are rendered.

Messages that are the same objects as the last time, at the same places and with equal values read from outside, are
written as they were then.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.meta import find_undeclared_variables

from router.chat_memory import ChatMemory
from router.template_environment import rendered
from router.template_turns import KNOWN, NotPlainError, Turns

MAX_BYTES: Final = 64 * 1024 * 1024
_NEW: Final = "_new_messages"
_END_OF_TURN: Final = os.urandom(16).hex()  # which nobody else can write
_UNLIKE: Final = object()  # any value that cannot be compared
_VALUES: Final = frozenset((str, int, bool, type(None), jinja2.Undefined))  # equal ones are written alike


@dataclass(frozen=True, slots=True)
class _Written:
    """A text, with where each message's part of it ends, and what was read from outside."""

    outside: list[Any]
    text: str
    ends: list[int]

    @property
    def cost_bytes(self) -> int:
        return sys.getsizeof(self.text)


class MessageLoops:
    """A template whose loops over messages remember what they wrote for the latest chats. Thread-safe."""

    def __init__(self, environment: jinja2.Environment, source: str, max_bytes: int = MAX_BYTES) -> None:
        """Raises NotPlainError where a loop may do more than write each message by itself, or there is none."""
        self._environment = environment
        self._memory: ChatMemory[_Written] = ChatMemory(max_bytes)
        tree = environment.parse(source)
        functions: dict[str, Callable[..., str]] = {}
        tree.body = self._replaced(tree.body, _from_messages(tree), functions)
        if not functions:
            raise NotPlainError
        self.template = environment.from_string(tree)
        self.template.globals = {**self.template.globals, **functions}

    def _replaced(
        self, body: list[nodes.Node], names: set[str], functions: dict[str, Callable[..., str]]
    ) -> list[nodes.Node]:
        """With calls in place of the loops over what these names stand for, those in other loops excepted.

        Raises NotPlainError.
        """
        replaced: list[nodes.Node] = []
        for node in body:
            if isinstance(node, nodes.If):
                node.body, node.else_ = (
                    self._replaced(each, names, functions) for each in (node.body, node.else_)
                )
                self._replaced(list(node.elif_), names, functions)
            elif isinstance(node, nodes.For) and _names_in(node.iter) & names:
                node = self._call(node, functions)
            replaced.append(node)
        return replaced

    def _call(self, loop: nodes.For, functions: dict[str, Callable[..., str]]) -> nodes.Node:
        """A call that writes what the loop does. Raises NotPlainError."""
        if not isinstance(loop.target, nodes.Name) or loop.test or loop.recursive or loop.else_:
            raise NotPlainError
        turns = Turns()
        end = nodes.Output([nodes.TemplateData(_END_OF_TURN)])
        body = [*(turns.visit(node) for node in loop.body), end]
        new = nodes.For(loop.target, nodes.Name(_NEW, "load"), body, [], None, False)
        tree = nodes.Template([new])
        tree.set_lineno(loop.lineno).set_environment(self._environment)
        read = sorted(find_undeclared_variables(tree) - {_NEW, KNOWN})
        template = self._environment.from_string(tree)
        template.globals = dict(template.globals)
        write = partial(self._write, len(functions), template, read, turns.asks_for_last)
        name = f"_write_messages_{len(functions)}"
        functions[name] = write
        arguments = [loop.iter, *(nodes.Name(each, "load") for each in read)]
        call = nodes.Output([nodes.Call(nodes.Name(name, "load"), arguments, [], None, None)])
        return call.set_lineno(loop.lineno).set_environment(self._environment)

    def _write(
        self,
        loop: int,
        template: jinja2.Template,
        read: list[str],
        asks_for_last: bool,
        over: Any,
        *values: Any,
    ) -> str:
        """What a loop writes whose body reads these values from outside."""
        messages = list(over)
        outside = [
            _comparable(value, template.globals.get(name)) for name, value in zip(read, values, strict=True)
        ]
        kept, known = self._memory.find(messages, loop)
        if kept is not None and (kept.outside != outside or _UNLIKE in outside):
            known = 0
        elif kept is not None and asks_for_last and known == len(kept.ends):
            known -= 1  # which was the last one then
        variables = dict(zip(read, values, strict=True)) | {_NEW: messages[known:], KNOWN: known}
        parts = rendered(template, variables).split(_END_OF_TURN)[:-1]
        if not known:
            text, ends = "".join(parts), list(accumulate(map(len, parts)))
        else:
            assert kept is not None
            text = kept.text[: kept.ends[known - 1]] + "".join(parts)
            ends = kept.ends[: known - 1] + list(accumulate(map(len, parts), initial=kept.ends[known - 1]))
        if _UNLIKE not in outside:
            self._memory.keep(messages, _Written(outside, text, ends), loop)
        return text


def _names_in(node: nodes.Node) -> set[str]:
    names = {name.name for name in node.find_all(nodes.Name)}
    return names | {node.name} if isinstance(node, nodes.Name) else names


def _from_messages(tree: nodes.Template) -> set[str]:
    """Names of what is made of the messages."""
    names, before = {"messages"}, 0
    while len(names) > before:
        before = len(names)
        for assignment in tree.find_all(nodes.Assign):
            if isinstance(assignment.target, nodes.Name) and _names_in(assignment.node) & names:
                names.add(assignment.target.name)
    return names


def _comparable(value: Any, of_environment: Any) -> Any:
    if type(value) in _VALUES:
        return (type(value), None if type(value) is jinja2.Undefined else value)
    return None if value is of_environment and callable(value) else _UNLIKE
