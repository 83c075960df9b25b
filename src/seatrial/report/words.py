"""How values become words: numbers a person reads, text that cannot hide anything.

Every reporter but JSON shows only what went through here. Text that a candidate may have written (its
output, its paths, its error messages) can carry terminal escapes, right-to-left overrides or control
characters; they are spelled out, so what is on the screen is what is there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from seatrial.model import Outcome, Verdict

# Control characters but tab and newline, the bidirectional controls, invisible separators, the byte
# order mark and lone surrogates: everything that draws nothing yet changes what a reader sees.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ufffe\uffff\ud800-\udfff]"
)
_NAME = 160  # characters of a name; longer ones are nobody's name
_LONGEST = 20_000  # characters of one text; a page stays a page even when a candidate prints a novel

VERDICT_WORDS = {
    Verdict.ACCEPTED: "Accepted",
    Verdict.ACCEPTED_WITH_LIMITS: "Accepted with limits",
    Verdict.REJECTED: "Rejected",
    Verdict.INCONCLUSIVE: "Inconclusive",
}
OUTCOME_WORDS = {
    Outcome.HELD: "held",
    Outcome.FAILED: "failed",
    Outcome.LIMITED: "limited",
    Outcome.NOTED: "noted",
    Outcome.NOT_APPLICABLE: "not applicable",
    Outcome.NOT_VERIFIED: "not verified",
}
GRADE_WORDS = {
    "F32": "accurate as an fp32 accumulator",
    "TC": "accurate as a tensor core",
    "IO": "only as accurate as the storage type",
    "REJECT": "less accurate than any honest kernel",
}


def plain(text: str) -> str:
    """The text with every hidden character spelled out; line breaks stay."""
    text = text.replace("\r\n", "\n")
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]} … ({len(text) - _LONGEST} more characters)"
    return _HIDDEN.sub(lambda match: _spelled(match.group()), text)


def one_line(text: str) -> str:
    """The text on one line, hidden characters spelled out."""
    return " ".join(plain(text).split())


def _spelled(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def number(value: float | None) -> str:
    """At most four significant digits; NaN and the infinities in words; nothing for None."""
    if value is None:
        return ""
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "infinite" if value > 0 else "minus infinite"
    if value == 0:
        return "0"
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    if 1e-3 <= abs(value) < 1e6:
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def amount(value: float | None, unit: str) -> str:
    """A number with its unit; what is not finite has none."""
    if value is None or not math.isfinite(value):
        return number(value)
    return f"{number(value)} {name(unit)}".strip()


def name(text: str) -> str:
    """A name or label: one line, and short enough to stand beside others."""
    return shortened(one_line(text), _NAME)


def shortened(text: str, length: int) -> str:
    """The text, cut to so many characters where there is no room for more."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def seconds(value: float) -> str:
    """A duration a person can feel: milliseconds, seconds or minutes."""
    if not math.isfinite(value):
        return "unknown time"
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 120:
        return f"{value:.1f} s"
    return f"{value / 60:.1f} min"


def count(things: int, singular: str, plural: str = "") -> str:
    """ "1 objection", "3 objections"."""
    return f"{things} {singular if things == 1 else plural or singular + 's'}"


def axes(sizes: Mapping[str, int]) -> str:
    """ "vocab 32000, rows 4096"."""
    return ", ".join(f"{name(axis)} {size}" for axis, size in sizes.items())


def listing(values: Sequence[object]) -> str:
    """ "[3, 17]"."""
    return "[" + ", ".join(str(value) for value in values) + "]"
