"""What an aten operation is called, and what it is given, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def name_of(func: Any) -> str:
    """The aten name without namespace, overload and the underscore of in-place forms."""
    name: str = func._schema.name.split("::")[1]
    return name.rstrip("_") if not name.endswith("__") else name


def bind(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by schema name, defaults filled in."""
    call: dict[str, Any] = {}
    for place, argument in enumerate(func._schema.arguments):
        if place < len(args):
            call[argument.name] = args[place]
        elif argument.name in kwargs:
            call[argument.name] = kwargs[argument.name]
        elif argument.has_default_value():
            call[argument.name] = argument.default_value
    return call
