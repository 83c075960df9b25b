"""Reading JSON that people wrote: every failure names the file, the line and the next step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from seatrial.errors import UsageError

MOST_NAMES = 8  # fields named in one sentence


def read_text(path: Path, error: type[UsageError]) -> str:
    """The text of `path` as UTF-8; raises `error` when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as fault:
        raise error(f"{path} is not UTF-8 text (byte {fault.start}); save it as UTF-8") from fault
    except OSError as fault:
        reason = fault.strerror or type(fault).__name__
        raise error(f"{path} cannot be read ({reason}); check the path and its permissions") from fault


def parse_object(
    text: str, path: Path, error: type[UsageError], *, first_line: int = 1, wanted: str = ""
) -> dict[str, Any]:
    """The JSON object in `text`, which starts at `first_line` of `path`; raises `error` for anything else.

    `wanted` says in words what the object should be.
    """
    try:
        found = json.loads(text)
    except json.JSONDecodeError as fault:
        place = f"{path}, line {first_line + fault.lineno - 1}, column {fault.colno}"
        raise error(f"{place}: not valid JSON ({fault.msg}); correct the text there") from fault
    except RecursionError as fault:
        raise error(f"{path}, line {first_line}: JSON nested too deeply to read; flatten it") from fault
    if not isinstance(found, dict):
        raise error(
            f"{path}, line {first_line}: expected {wanted or 'a JSON object'} but found {_kind(found)}; give one object, {{…}}"
        )
    return found


def read_object(path: Path, error: type[UsageError], *, wanted: str = "") -> dict[str, Any]:
    """The JSON object that fills the file `path`."""
    return parse_object(read_text(path, error), path, error, wanted=wanted)


def read_lines(path: Path, error: type[UsageError]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) for every non-empty line of a JSON-lines file."""
    for number, line in enumerate(read_text(path, error).split("\n"), start=1):
        if line.strip():
            yield number, parse_object(line, path, error, first_line=number)


def one_sentence(fault: ValidationError) -> str:
    """What pydantic objects to: all missing fields by name, else the first fault with the value it saw."""
    faults = fault.errors(include_url=False)
    missing = [_field(one) for one in faults if one["type"] == "missing"]
    if faults[0]["type"] == "missing":
        others = len(faults) - len(missing)
        more = f", and {others} more {'fault' if others == 1 else 'faults'} beside" if others else ""
        one = len(missing) == 1
        return f"{'field' if one else 'fields'} {_listed(missing)} {'is' if one else 'are'} missing{more}; add {'it' if one else 'them'}"
    first = faults[0]
    message = first["msg"].removeprefix("Value error, ").rstrip(".")
    also = f", and {len(faults) - 1} more: {_listed([_field(one) for one in faults[1:]])}" if len(faults) > 1 else ""
    found = "" if first["type"] == "value_error" else f" (found {_short(first['input'])})"
    return f"field {_field(first)}: {message}{found}{also}"


def _field(fault: ErrorDetails) -> str:
    return ".".join(str(part) for part in fault["loc"]) or "the object"


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:MOST_NAMES])
    return f"{shown} and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else shown


def _kind(value: object) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return {str: "a string", bool: "true or false", type(None): "null"}.get(type(value), "a number")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
