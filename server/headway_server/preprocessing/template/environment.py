"""Where a chat template runs: Jinja's sandbox, narrowed to what such templates need and held to limits.

A template is a program that came with a model. It cannot reach anything but the conversation, and it cannot keep the
server busy. Jinja's immutable sandbox forbids private attributes and changes; here also

- only listed filters and methods exist, none of which makes much of little (`center`, `format`, `%` on text, `**`);
- every iteration, call, filter, test, operator and comparison is a step, and steps and processor time are counted;
- texts, numbers and containers have a largest size, all texts together too, and containers are not written out but
  by `tojson`.

So a run ends within its time and what one operation takes on values of that size, some tens of milliseconds. Its
memory is held to a few hundred megabytes, not to less. What is not bounded in time is parsing and compiling, which
happen once, at load, on a file of limited size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, Final

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace

from headway_server.preprocessing.template.filters import counted, marked, template_filters
from headway_server.preprocessing.template.limits import (
    MAX_TEXT_LENGTH,
    LimitError,
    check_length,
    check_value,
    join_within_limits,
    metered,
    replace_within_limits,
    step,
    weigh,
    written,
)
from headway_server.preprocessing.template.marked_text import MarkedText, join

_METHODS: Final[tuple[tuple[type, frozenset[str]], ...]] = (
    (
        str,
        frozenset(
            (
                *("capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdigit", "islower"),
                *("isspace", "isupper", "join", "lower", "lstrip", "removeprefix", "removesuffix", "replace", "rfind"),
                *("rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "title", "upper"),
            )
        ),
    ),
    (dict, frozenset({"get", "items", "keys", "values"})),
    (list, frozenset({"count", "index"})),
    (tuple, frozenset({"count", "index"})),
)
"""The methods a template may call, by type."""
_LONGEST_DATE_FORMAT = 64


class RefusedConversationError(TemplateError):
    """The template says, by `raise_exception`, that it has no prompt for such a conversation."""


def write(template: Template, **values: object) -> MarkedText:
    """Writes a template of `TemplateEnvironment`, with its marks.

    Raises:
        RefusedConversationError: The template refuses.
        LimitError: It takes too much.
        Exception: Whatever a wrong template leads to.
    """
    chunks: list[str] = []
    length = 0
    with metered():
        for chunk in template.generate(**values):
            length += len(chunk)
            if length > MAX_TEXT_LENGTH:
                break
            chunks.append(chunk)
        check_length(length)
    return join("", chunks)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox. Settings, names and extensions are those that chat templates are written for."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _GenerationBlock],
            finalize=written,
            optimized=False,  # nothing is computed while a template is compiled
        )
        self.code_generator_class = _MeteredCode
        self.filters = template_filters()
        tests: dict[str, Any] = self.tests
        self.tests = {name: counted(test) for name, test in tests.items()}
        self.globals = {
            "dict": dict,
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "range": safe_range,
            "strftime_now": _strftime_now,
        }

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allows the methods that are listed, and what belongs to Jinja's own objects."""
        if not super().is_safe_attribute(obj, attr, value):
            return False
        if isinstance(obj, Namespace | LoopContext | Macro):
            return True
        return any(isinstance(obj, kind) and attr in names for kind, names in _METHODS)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        """Refuses at once; Jinja's own would be written as nothing."""
        raise SecurityError(f"{type(obj).__name__}.{attribute} is not for chat templates")

    def wrap_str_format(self, value: Any) -> None:
        """Refuses `format` and `format_map`, which Jinja's own would allow before anything is asked."""
        if super().wrap_str_format(value) is not None:
            raise SecurityError("str.format is not for chat templates; join texts with + or ~")

    def call(__self, __context: Context, __obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (Jinja's names)
        """Calls a method, function or macro as a step."""
        step()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if not isinstance(owner, str):
            result = super().call(__context, __obj, *args, **kwargs)
            check_value(result)
            return result
        if not __self.is_safe_attribute(owner, name, __obj):
            raise SecurityError(f"str.{name} is not for chat templates")
        if name == "join":
            return join_within_limits(owner, *args)
        if name == "replace":
            return replace_within_limits(owner, *args)
        result = super().call(__context, __obj, *args, **kwargs)
        check_value(result)
        return marked(result, (owner, *args))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Computes a binary operator as a step, if its result cannot be large."""
        step()
        if operator == "**" or (operator == "%" and not _is_number(left)):
            raise SecurityError(f"{operator} on {type(left).__name__} is not for chat templates")
        if operator == "*" and not (_is_number(left) and _is_number(right)):
            _check_repetition(left, right)
        result = super().call_binop(context, operator, left, right)
        check_value(result)
        return result

    @staticmethod
    def concat(chunks: Iterable[str]) -> str:
        """Joins what a macro or a block has written."""
        return join_within_limits("", chunks)

    @staticmethod
    def join_values(values: Iterable[object]) -> str:
        """Computes the operator `~`."""
        step()
        return join_within_limits("", map(written, values))

    @staticmethod
    def iteration() -> bool:
        """Is called at each iteration of a loop, so that it is a step; is true, to stand before a loop's condition."""
        return True

    @staticmethod
    def compared(result: object) -> object:
        """Passes on the result of a comparison as a step: looking something up in a list takes a while."""
        step()
        return result

    @staticmethod
    def sliced(value: Any, part: slice) -> Any:
        """Takes a part of a text or list as a step."""
        step()
        result = value[part]
        check_value(result)
        return result

    @staticmethod
    def weighed(container: object) -> object:
        """Passes on a list, tuple or dictionary that the template writes, if it is not too much."""
        weigh(container)
        return container


class _MeteredCode(CodeGenerator):
    """Jinja's compiler, so changed that loops are counted and texts keep their marks."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802 (the visitor's name for it)
        tick = nodes.Call(nodes.EnvironmentAttribute("iteration"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))
        if node.test is not None:
            node.test = nodes.And(tick, node.test)
        super().visit_For(node, frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802 (the visitor's name for it)
        self.write("environment.compared(")
        super().visit_Compare(node, frame)
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 (the visitor's name for it)
        self.write("environment.join_values((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802 (the visitor's name for it)
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.sliced(")
        self.visit(node.node, frame)
        self.write(", slice(")
        for bound in (node.arg.start, node.arg.stop, node.arg.step):
            self.visit(bound or nodes.Const(None), frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802 (the visitor's name for it)
        self._weigh(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802 (the visitor's name for it)
        self._weigh(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802 (the visitor's name for it)
        if node.ctx == "load":
            self._weigh(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_EvalContextModifier(  # noqa: N802 (the visitor's name for it)
        self, node: nodes.EvalContextModifier, frame: Frame
    ) -> None:
        del frame
        self.fail("autoescape is not for chat templates", node.lineno)

    def visit_ScopedEvalContextModifier(  # noqa: N802 (the visitor's name for it)
        self, node: nodes.ScopedEvalContextModifier, frame: Frame
    ) -> None:
        self.visit_EvalContextModifier(node, frame)

    def _weigh(self, visit: Callable[[Any, Frame], None], node: nodes.Node, frame: Frame) -> None:
        self.write("environment.weighed(")
        visit(node, frame)
        self.write(")")


class _GenerationBlock(Extension):
    """`{% generation %}` marks the model's own turns for training; here it is what is in it."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Namespace(Namespace):
    """Jinja's, but that it is not written out: what it holds may be shared, so that there is no end to it."""

    def __repr__(self) -> str:
        return "<namespace>"


def _check_repetition(left: Any, right: Any) -> None:
    repeated, count = (right, left) if isinstance(left, int) else (left, right)
    if not isinstance(repeated, str) or not isinstance(count, int):
        raise SecurityError(f"{type(left).__name__} * {type(right).__name__} is not for chat templates")
    check_length(len(repeated) * max(count, 0))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


@pass_context  # not computed while a template is compiled
def _raise_exception(_context: Context, message: object = "") -> None:
    raise RefusedConversationError(written(message))


def _strftime_now(template: str) -> str:
    if len(template) > _LONGEST_DATE_FORMAT:
        raise LimitError(f"writes the date by a format of more than {_LONGEST_DATE_FORMAT} characters")
    return datetime.now().astimezone().strftime(template)
