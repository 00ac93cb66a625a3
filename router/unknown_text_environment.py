"""Jinja for chat templates that are rendered without knowing what the messages say."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from types import BuiltinMethodType, MethodType
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context, LoopContext, Macro

from router.template_environment import ChatCode, ChatEnvironment, template_environment
from router.unknown_text import ContentReadError, UnknownText

_FUNCTIONS: Final = ("raise_exception", "range", "dict", "namespace")  # which say the same each time
_METHODS_OF: Final = frozenset((str, int, float, list, tuple, dict))
_TEXT_METHODS: Final = frozenset(("strip", "lstrip", "rstrip", "split", "startswith", "endswith"))
_PASSING_FILTERS: Final = frozenset(("default", "d"))  # which hand on what they are given
_TEXT_TESTS: Final = {
    **dict.fromkeys(("defined", "string", "iterable", "sequence"), True),
    **dict.fromkeys(("undefined", "none", "mapping", "number", "integer", "float"), False),
    **dict.fromkeys(("boolean", "true", "false", "callable", "escaped"), False),
}


def unknown_text_environment() -> jinja2.Environment:
    """As ``template_environment``, but that contents may be ``UnknownText``.

    Its templates yield ``str`` or ``UnknownText``, and raise ContentReadError where that may be another text for
    other contents, or the next time.
    """
    environment = template_environment(_Environment)
    for name, function in environment.filters.items():
        environment.filters[name] = _filter(name, function)
    tests: dict[str, Any] = environment.tests
    for name, function in tests.items():
        tests[name] = _test(name, function)
    return environment


def escapes(tree: nodes.Template) -> bool:
    """Whether the template may switch on the escaping of what it writes, which would read contents."""
    return (
        tree.find(nodes.EvalContextModifier) is not None
        or tree.find(nodes.ScopedEvalContextModifier) is not None
    )


def joined(parts: Iterable[str | UnknownText]) -> str | UnknownText:
    """These texts one after the other. Raises TypeError where a part is none."""
    texts = list(parts)
    unknown = next((text for text in texts if isinstance(text, UnknownText)), None)
    return "".join(texts) if unknown is None else unknown.joined(texts)  # type: ignore[arg-type]


def _text(value: Any) -> str | UnknownText:
    return value if type(value) is UnknownText else str(value)


class _Code(ChatCode):
    """Leaves unknown text as it is where text is made of values."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for each in node.nodes:
            self.write("environment.text(")
            self.visit(each, frame)
            self.write("), ")
        self.write("))")

    def _output_child_pre(
        self, node: nodes.Expr, frame: Frame, finalize: CodeGenerator._FinalizeInfo
    ) -> None:
        self.write("environment.text(")


class _Environment(ChatEnvironment):
    code_generator_class = _Code
    concat = staticmethod(joined)  # type: ignore[assignment]
    text = staticmethod(_text)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is not UnknownText:
            return super().getattr(obj, attribute)
        if attribute in _TEXT_METHODS:
            return getattr(obj, attribute)
        if hasattr(str, attribute):
            raise ContentReadError
        return self.undefined(obj=obj, name=attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if type(argument) is UnknownText:
            raise ContentReadError
        if type(obj) is not UnknownText:
            return super().getitem(obj, argument)
        if type(argument) is not str:
            raise ContentReadError
        return self.getattr(obj, argument)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if not __self._is_understood(__obj):
            raise ContentReadError
        return super().call(__context, __obj, *args, **kwargs)

    def _is_understood(self, called: Any) -> bool:
        """Whether its result depends on its arguments alone, of which it reads none that is unknown unnoticed."""
        if type(called) is BuiltinMethodType:
            return type(called.__self__) in _METHODS_OF
        if type(called) is MethodType:
            return type(called.__self__) is UnknownText
        return type(called) in (Macro, LoopContext) or any(
            called is self.globals[name] for name in _FUNCTIONS
        )


def _filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Of what others are given, only what is within lists or dictionaries may be unknown: reading that raises."""

    @wraps(function)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        if name == "random":
            raise ContentReadError
        if not _has_unknown(args, kwargs):
            return function(*args, **kwargs)
        if len(args) == 1 and not kwargs and name in ("trim", "string"):
            return args[0].strip() if name == "trim" else args[0]
        raise ContentReadError

    return function if name in _PASSING_FILTERS else filtered


def _test(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def tested(*args: Any, **kwargs: Any) -> Any:
        if not _has_unknown(args, kwargs):
            if name == "sameas" and not any(args[-1] is each for each in (None, True, False)):
                raise ContentReadError  # which of equal objects are the same is nobody's promise
            return function(*args, **kwargs)
        if name not in _TEXT_TESTS or len(args) != 1:
            raise ContentReadError
        return _TEXT_TESTS[name]

    return tested


def _has_unknown(args: Iterable[Any], kwargs: dict[str, Any]) -> bool:
    return any(type(each) is UnknownText for each in (*args, *kwargs.values()))
