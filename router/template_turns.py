"""Loops whose every turn depends on its message, its place and what is read from outside, and on nothing else."""

from __future__ import annotations

from typing import Any, Final

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

KNOWN: Final = "_known_messages"  # the variable that says how many messages are not gone through any more
_PURE_FUNCTIONS: Final = frozenset(("raise_exception", "range", "dict"))
_PLACES: Final = frozenset(("index", "index0"))
_UNDERSTOOD: Final = (
    *(nodes.Output, nodes.TemplateData, nodes.If, nodes.For, nodes.Assign, nodes.AssignBlock, nodes.Name),
    *(nodes.Const, nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair, nodes.CondExpr, nodes.Getattr),
    *(nodes.Getitem, nodes.Slice, nodes.Call, nodes.Keyword, nodes.Filter, nodes.Test, nodes.Concat),
    *(nodes.Compare, nodes.Operand, nodes.BinExpr, nodes.UnaryExpr),
)


class NotPlainError(Exception):
    """A loop's body may do more than write its message."""


class Turns(NodeTransformer):
    """Makes of a loop's body one that goes on behind known messages. Raises NotPlainError."""

    def __init__(self) -> None:
        self.asks_for_last = False
        self._nested = False

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(node, _UNDERSTOOD):  # such as what writes to a namespace, or ends the loop
            raise NotPlainError
        return super().visit(node, *args, **kwargs)

    def visit_For(self, node: nodes.For) -> nodes.For:
        if node.test is not None or node.recursive:
            raise NotPlainError
        node.iter = self.visit(node.iter)
        node.else_ = [self.visit(each) for each in node.else_]
        nested, self._nested = self._nested, True  # it has a ``loop`` of its own
        node.body = [self.visit(each) for each in node.body]
        self._nested = nested
        return node

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Node:
        if self._nested or not (isinstance(node.node, nodes.Name) and node.node.name == "loop"):
            self.generic_visit(node)
            return node
        known = nodes.Name(KNOWN, "load")
        if node.attr == "first":
            return nodes.And(node, nodes.Not(known))
        if node.attr in _PLACES:
            return nodes.Add(node, known)
        if node.attr != "last":
            raise NotPlainError
        self.asks_for_last = True
        return node

    def visit_Name(self, node: nodes.Name) -> nodes.Name:
        if node.name in ("self", "super", "caller") or (node.name == "loop" and not self._nested):
            raise NotPlainError
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Call:
        """Functions whose result may be another the next time are none of a few names, nor anything's methods."""
        called = node.node
        if not isinstance(called, nodes.Getattr) and not (
            isinstance(called, nodes.Name) and called.name in _PURE_FUNCTIONS
        ):
            raise NotPlainError
        self.generic_visit(node)
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Filter:
        if node.name == "random":
            raise NotPlainError
        self.generic_visit(node)
        return node

    def visit_Const(self, node: nodes.Const) -> nodes.Const:
        if node.value == "random":  # a filter's name, for ``map``
            raise NotPlainError
        return node
