"""Bodies in JSON whose elements are none of their fields'."""

from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

import pytest
from pydantic import ValidationError

from headway_server.transports.http import open_inference
from headway_server.transports.http.body import Part
from headway_server.transports.http.openai import requests, responses

PARTS = sorted(
    {
        kind
        for module in (open_inference, requests, responses)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Part)
    },
    key=lambda kind: kind.__name__,
)
NO_ELEMENT = object()


def lists_of(annotation: Any) -> Iterator[int]:
    """Yields how deep each list of an annotation is nested."""
    if get_origin(annotation) is list:
        yield 1
        yield from (1 + depth for depth in lists_of(get_args(annotation)[0]))
    elif get_origin(annotation) is Annotated:
        yield from lists_of(get_args(annotation)[0])
    else:
        yield from (depth for one in get_args(annotation) for depth in lists_of(one))


@pytest.mark.parametrize(
    ("kind", "name", "depth"),
    [
        (kind, name, depth)
        for kind in PARTS
        for name, field in kind.model_fields.items()
        for depth in sorted(set(lists_of(field.annotation)))
    ],
)
def test_of_many_wrong_elements_the_first_is_named(kind, name, depth):
    elements: Any = [NO_ELEMENT] * 100
    for _ in range(depth - 1):
        elements = [elements] * 100
    if (kind, name) == (open_inference.InputPart, "data"):  # whose elements are read as a tensor
        return
    with pytest.raises(ValidationError) as caught:
        kind.model_validate({name: elements})
    assert sum(1 for each in caught.value.errors() if each["loc"][0] == name) < 12
