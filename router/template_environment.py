"""Jinja as chat templates need it: sandboxed, and quick at reading the dictionaries that requests are made of."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_DICT_ATTRIBUTES = frozenset(dir(dict))


def template_environment(kind: type[ChatEnvironment] | None = None) -> jinja2.Environment:
    environment = (kind or ChatEnvironment)(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant said, for training; rendering passes it through."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatCode(CodeGenerator):
    """Reads what a dictionary has without calling the environment, which would answer the same.

    Of ``message.content`` and ``message['content']`` it makes ``subject['content']`` where the subject is a
    dictionary that has the key; names of dictionaries' attributes are left to the environment. What is only tested
    for truth need not become an ``Undefined`` where it is missing: that is false, too.
    """

    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:
        if node.attr in _DICT_ATTRIBUTES or isinstance(node.node, nodes.Const):
            super().visit_Getattr(node, frame)
        else:
            self._read(node, frame, node.attr, "getattr")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        key = node.arg.value if isinstance(node.arg, nodes.Const) else None
        if not isinstance(key, str) or isinstance(node.node, nodes.Const):
            super().visit_Getitem(node, frame)
        else:
            self._read(node, frame, key, "getitem")

    def visit_If(self, node: nodes.If, frame: Frame) -> None:
        for each in (node, *node.elif_):
            _mark_test(each.test)
        super().visit_If(node, frame)

    def visit_CondExpr(self, node: nodes.CondExpr, frame: Frame) -> None:
        _mark_test(node.test)
        super().visit_CondExpr(node, frame)

    def _read(self, node: nodes.Getattr | nodes.Getitem, frame: Frame, key: str, otherwise: str) -> None:
        tested = getattr(node, "only_tested", False)
        self.write(f"(({key!r} in subject and subject[{key!r}])" if tested else f"(subject[{key!r}]")
        self.write(" if type(subject := ")
        self.visit(node.node, frame)
        self.write(") is dict" if tested else f") is dict and {key!r} in subject")
        self.write(f" else environment.{otherwise}(subject, {key!r}))")


def _mark_test(test: nodes.Node) -> None:
    """Of the parts of a condition nothing matters but whether they are true."""
    if isinstance(test, nodes.Not):
        _mark_test(test.node)
    elif isinstance(test, nodes.And | nodes.Or):
        _mark_test(test.left)
        _mark_test(test.right)
    elif isinstance(test, nodes.Getattr | nodes.Getitem):
        test.only_tested = True  # type: ignore[union-attr]


class ChatEnvironment(ImmutableSandboxedEnvironment):
    code_generator_class = ChatCode

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As Jinja's own, which takes longer: it tries a dictionary's attributes before its keys.

        What a template reads of its loops and namespaces is safe unless it begins with an underscore, or is called.
        """
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if (type(obj) is Namespace or type(obj) is LoopContext) and not attribute.startswith("_"):
            value = getattr(obj, attribute, None)
            if value is not None and not callable(value):
                return value
        return super().getattr(obj, attribute)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """As Jinja's own, which first finds out that these are functions like any other."""
        if __obj is Namespace or __obj is _raise_exception:
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return __obj(*args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)


def rendered(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """As Jinja's own ``render``, but that errors keep the lines of the compiled template."""
    context = Context(
        template.environment,
        {**template.globals, **variables},
        template.name,
        template.blocks,
        template.globals,
    )
    return "".join(template.root_render_func(context))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter, escapes nothing for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
