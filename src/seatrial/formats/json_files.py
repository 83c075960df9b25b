"""Reading JSON that people wrote: every failure names the file, the line and the next step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from seatrial.errors import UsageError


def read_text(path: Path, error: type[UsageError]) -> str:
    """The text of `path` as UTF-8; raises `error` when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as fault:
        raise error(f"{path} is not UTF-8 text (byte {fault.start}); save it as UTF-8") from fault
    except OSError as fault:
        reason = fault.strerror or type(fault).__name__
        raise error(f"{path} cannot be read ({reason}); check the path and its permissions") from fault


def parse_object(text: str, path: Path, error: type[UsageError], *, first_line: int = 1) -> dict[str, Any]:
    """The JSON object in `text`, which starts at `first_line` of `path`; raises `error` for anything else."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as fault:
        place = f"{path}, line {first_line + fault.lineno - 1}, column {fault.colno}"
        raise error(f"{place}: not valid JSON ({fault.msg}); correct the text there") from fault
    except RecursionError as fault:
        raise error(f"{path}, line {first_line}: JSON nested too deeply to read; flatten it") from fault
    if not isinstance(found, dict):
        raise error(f"{path}, line {first_line}: expected a JSON object but found {_kind(found)}; wrap it in {{…}}")
    return found


def read_object(path: Path, error: type[UsageError]) -> dict[str, Any]:
    """The JSON object that fills the file `path`."""
    return parse_object(read_text(path, error), path, error)


def read_lines(path: Path, error: type[UsageError]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) for every non-empty line of a JSON-lines file."""
    for number, line in enumerate(read_text(path, error).split("\n"), start=1):
        if line.strip():
            yield number, parse_object(line, path, error, first_line=number)


def one_sentence(fault: ValidationError) -> str:
    """The first thing pydantic objects to: field, what is wrong, the value it saw."""
    first = fault.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or "the object"
    message = first["msg"].removeprefix("Value error, ").rstrip(".")
    more = f", and {fault.error_count() - 1} more" if fault.error_count() > 1 else ""
    if first["type"] == "missing":
        return f"field {field} is missing{more}; add it"
    if first["type"] == "value_error":
        return f"field {field}: {message}{more}"
    return f"field {field}: {message} (found {_short(first['input'])}){more}"


def _kind(value: object) -> str:
    return {list: "a list", str: "a string", bool: "true or false", type(None): "null"}.get(type(value), "a number")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
