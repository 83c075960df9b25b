"""The JSON schema of what `--json` writes, generated from the records.

JSON has no word for NaN and the infinities, so pydantic writes three strings; its own schema does not
know them. Here every number admits them, so that what is written is always valid.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic.json_schema import models_json_schema

from seatrial.model import Report
from seatrial.report.json_file import SeveralReports

NOT_FINITE = ["NaN", "Infinity", "-Infinity"]


def schema_text() -> str:
    """The schema as stable JSON text, ending in a newline."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


def schema() -> dict[str, Any]:
    """A report of one candidate, or the file for several."""
    models: Any = [(Report, "serialization"), (SeveralReports, "serialization")]
    definitions = models_json_schema(models)[1]["$defs"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "seatrial report",
        "anyOf": [{"$ref": "#/$defs/Report"}, {"$ref": "#/$defs/SeveralReports"}],
        "$defs": {name: _with_three_strings(definitions[name]) for name in sorted(definitions)},
    }


def _with_three_strings(node: Any) -> Any:
    if isinstance(node, list):
        return [_with_three_strings(item) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "number":
        kept = {key: node[key] for key in ("title", "description", "default") if key in node}
        return {"anyOf": [{"type": "number"}, {"enum": NOT_FINITE}], **kept}
    return {key: _with_three_strings(item) for key, item in node.items()}
