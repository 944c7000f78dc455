"""The filters and tests that chat templates may use, each counted as a step and held to the limits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal

from jinja2 import Undefined, pass_context
from jinja2.filters import FILTERS
from jinja2.runtime import Context

from headway_server.preprocessing.template.limits import (
    LimitError,
    check_value,
    join_within_limits,
    replace_within_limits,
    step,
    weigh,
    written,
)
from headway_server.preprocessing.template.marked_text import MarkedText

_MAX_INDENT = 16
_MAX_PLACES = 15

_CHOOSING: Final = (
    *("d", "default", "dictsort", "first", "items", "last", "list", "map", "max", "min", "reject", "rejectattr"),
    *("select", "selectattr", "sort", "sum", "unique"),
)
"""Jinja's filters that hand on what is there and make no text."""

_MAKING: Final = (
    *("abs", "capitalize", "count", "float", "int", "length", "lower", "reverse", "title", "trim", "upper"),
)
"""Jinja's filters that make a new value."""


def template_filters() -> dict[str, Callable[..., Any]]:
    """Returns the filters by name."""
    own = {"join": _join, "replace": _replace, "round": _round, "safe": written, "string": written, "tojson": _tojson}
    handing_on = {name: FILTERS[name] for name in _CHOOSING} | own
    making = {name: FILTERS[name] for name in _MAKING}
    return {name: _limited(function, makes_text=False) for name, function in handing_on.items()} | {
        name: _limited(function, makes_text=True) for name, function in making.items()
    }


def marked(result: Any, sources: Iterable[object]) -> Any:
    """Marks a text of which it is not known who wrote what as content, if anything it was made of is."""
    if type(result) is str and not all(_is_templates_own(source) for source in sources):
        return MarkedText(result)
    return result


def _is_templates_own(value: object) -> bool:
    if isinstance(value, str):
        return not isinstance(value, MarkedText)
    return value is None or isinstance(value, bool | int | float | Undefined)


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a filter or a test of Jinja's a step."""
    wanted = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @pass_context  # what depends on the context is not computed while the template is compiled
    def stepping(context: Context, *args: Any, **kwargs: Any) -> Any:
        step()
        first = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        return function(*((first[wanted],) if wanted else ()), *args, **kwargs)

    return stepping


def _limited(function: Callable[..., Any], *, makes_text: bool) -> Callable[..., Any]:
    """Makes a filter a step whose result is held to the limits."""
    stepping = counted(function)

    @pass_context
    def limited(context: Context, *args: Any, **kwargs: Any) -> Any:
        result = stepping(context, *args, **kwargs)
        check_value(result)
        return marked(result, (*args, *kwargs.values())) if makes_text else result

    return limited


@pass_context
def _join(context: Context, values: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        values = (context.environment.getitem(value, attribute) for value in values)
    return join_within_limits(written(d), map(written, values))


def _replace(text: Any, old: str, new: str, count: int = -1) -> str:
    return replace_within_limits(written(text), old, new, count)


def _round(value: float, precision: int = 0, method: Literal["common", "ceil", "floor"] = "common") -> Any:
    """Rounds as Jinja does, whose own computes a power of ten as large as it is told to."""
    if not -_MAX_PLACES <= precision <= _MAX_PLACES:
        raise LimitError(f"rounds to {precision} places; -{_MAX_PLACES} to {_MAX_PLACES} are possible")
    return FILTERS["round"](value, precision, method)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Writes JSON as chat templates expect it: without the escapes for HTML that Jinja's own makes."""
    has_content = weigh(value)
    if indent is not None and not 0 <= indent <= _MAX_INDENT:
        raise LimitError(f"indents JSON by {indent}; 0 to {_MAX_INDENT} is possible")
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return MarkedText(text) if has_content else text
