"""The templates on disk, always escaping."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

TEMPLATES = Path(__file__).parent / "templates"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,  # whatever a file is called
        undefined=StrictUndefined,  # a misspelt name is an error, not an empty place
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["breakable"] = breakable
    environment.filters["prose"] = prose
    environment.filters["value"] = lambda text: _code_in_backticks(breakable(text))
    return environment


def breakable(text: str) -> Markup:
    """A name or path that may break after its joints; what is copied from the page stays the same."""
    # Joints are sought in the escaped text: an entity has none.
    return Markup(re.sub(r"([_/\\:])(?=[^\s_/\\:])", r"\1<wbr>", str(escape(text))))


def rendered(template: str, **values: Any) -> str:
    """The text of one template."""
    return _environment().get_template(template).render(**values)


def prose(text: str) -> Markup:
    """A sentence in which `names in backticks` are set as code."""
    return _code_in_backticks(escape(text))


def _code_in_backticks(escaped: Markup) -> Markup:
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escaped)))
