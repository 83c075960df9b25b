"""A single fault at one operation of the reference's trace: finding the places, and running the reference with it.

One native run lists every operation with the reference's source line. A mutant is the reference under a dispatch mode
that alters exactly one operation call, found again by line, operation and count, so that it works at other sizes too.
The result of the call is replaced in place: whatever bookkeeping a run around it keeps (the oracle's ledger of declared
dtypes) stays right, so the same mutant runs in fp64.
"""

from __future__ import annotations

import linecache
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

import seatrial
from seatrial.adequacy.kinds import BY_NAME, KINDS, Call, Kind
from seatrial.model import Value
from seatrial.numerics.promote import DeclaredDtypes, Promotion
from seatrial.numerics.schema import bind, name_of
from seatrial.numerics.trace import flatten_outputs

_OURS = (str(Path(seatrial.__file__).parent), str(Path(torch.__file__).parent))
_MATHS = torch.nn.attention.SDPBackend.MATH
_SHOWN = 72  # characters of a source line

Reference = Callable[..., Any]


@dataclass(frozen=True)
class Site:
    """One operation call of the reference: the `count`-th of this operation on this line."""

    op: str
    line: int
    count: int
    source: str = ""

    @property
    def words(self) -> str:
        text = self.source.strip()
        shown = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
        return f"line {self.line}" + (f": `{shown}`" if shown else "")


@dataclass(frozen=True)
class Mutant:
    """The reference with one fault.

    `site` and `kind` name an altered operation; where they are None, `change` alters the inputs instead (a size or
    scalar that is compiled in; `axis` is the one whose length is).
    """

    name: str
    words: str
    site: Site | None = None
    kind: Kind | None = None
    seed: int = 0
    change: Callable[[Sequence[Value]], list[Value]] | None = None
    axis: str = ""

    @property
    def is_carry(self) -> bool:
        return self.kind is not None and self.kind.carry

    @property
    def is_rounding(self) -> bool:
        return self.kind is not None and self.kind.rounds


def planted(reference: Reference, mutant: Mutant) -> Reference:
    """The reference as the mutant computes it; the same arguments and results."""

    def run(*inputs: Value) -> Any:
        if mutant.change is not None:
            inputs = tuple(mutant.change(inputs))
        with written_out(), _Plant(mutant):
            return reference(*inputs)

    return run


@contextmanager
def written_out() -> Iterator[None]:
    """Attention in its single steps, so that a fault can be planted in each."""
    with torch.nn.attention.sdpa_kernel(_MATHS):
        yield


def exact_outputs(reference: Reference, inputs: Sequence[Value], names: Sequence[str]) -> list[Tensor]:
    """The outputs of one fp64 run, before their last rounding; raises whatever the reference raises."""
    home = next((v.device for v in inputs if isinstance(v, Tensor)), torch.device("cpu"))
    promotion = Promotion()
    admitted = [promotion.admit(v) for v in inputs]
    with torch.random.fork_rng(devices=[]), promotion, DeclaredDtypes(promotion, home):
        returned = reference(*admitted)
    flat = [promotion.admit_late(v) for v in flatten_outputs(returned, names)]
    return [promotion.unrounded(v).detach() if isinstance(v, Tensor) else torch.tensor(v) for v in flat]


# -- finding places ---------------------------------------------------------------------------------


def find_mutants(
    reference: Reference, inputs: Sequence[Value], *, source: str = "", seed: int = 0
) -> tuple[Mutant, ...]:
    """Every kind at every place it applies to, once per source line and operation; raises what the reference raises."""
    copies = [v.detach().clone() if isinstance(v, Tensor) else v for v in inputs]
    census = _Census(source)
    with written_out(), census:
        reference(*copies)
    dice = random.Random(seed)
    found = []
    for (kind, _, _), sites in census.places().items():
        site = dice.choice(sites)
        words = f"{BY_NAME[kind].words.format(op=site.op.lstrip('_'))} at {site.words}"
        found.append(
            Mutant(f"{kind} {site.line}:{site.op}:{site.count}", words, site, BY_NAME[kind], dice.randrange(2**31))
        )
    return tuple(found)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its mode untyped
    """Counts operation calls per source line."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts: dict[tuple[int, str], int] = defaultdict(int)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would import its compiler (seconds) only to keep it away from this mode; nothing here compiles."""
        return False

    def here(self, op: str) -> tuple[Site, str]:
        """The place of the call that is being dispatched, and the file it stands in."""
        line, file = _calling_line()
        count = self._counts[line, op]
        self._counts[line, op] += 1
        return Site(op, line, count), file


class _Census(_Watch):  # type: ignore[no-untyped-call]
    def __init__(self, source: str) -> None:
        super().__init__()
        self._lines = source.splitlines()
        self._calls: list[tuple[Site, list[str]]] = []
        self._makers: dict[int, tuple[StorageWeakRef, int]] = {}
        self._readers: dict[int, set[str]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op, given = name_of(func), bind(func, args, kwargs or {})
        site, file = self.here(op)
        for tensor in (t for t in tree_flatten(list(given.values()))[0] if isinstance(t, Tensor)):
            maker = self._makers.get(tensor.untyped_storage()._cdata)
            if maker is not None:
                self._readers[maker[1]].add(op)
        out = func(*args, **(kwargs or {}))
        result = first_tensor(out)
        if result is not None and not is_view(func):
            call = Call(op, func, given, result.dtype, tuple(result.shape))
            self._calls.append((replace(site, source=self._text(site.line, file)), _fitting(call)))
            storage = result.untyped_storage()
            self._makers[storage._cdata] = (StorageWeakRef(storage), len(self._calls) - 1)  # type: ignore[no-untyped-call]
        return out

    def _text(self, line: int, file: str) -> str:
        text = linecache.getline(file, line)
        return text or (self._lines[line - 1] if 0 < line <= len(self._lines) else "")

    def places(self) -> Mapping[tuple[str, int, str], list[Site]]:
        """Kind, line and operation -> the calls there that the kind applies to."""
        places: dict[tuple[str, int, str], list[Site]] = defaultdict(list)
        for number, (site, kinds) in enumerate(self._calls):
            readers = self._readers[number]
            for kind in kinds:
                # A tensor core may round its operands and a store rounds anyway, so that is no fault.
                if kind == "narrow-value" and (not readers or readers & NARROWING):
                    continue
                places[kind, site.line, site.op].append(site)
        return places


NARROWING = frozenset({"mm", "bmm", "addmm", "baddbmm", "mv", "dot", "convolution", "_to_copy"})


def _fitting(call: Call) -> list[str]:
    return [kind.name for kind in KINDS if call.op in kind.ops and kind.fits(call)]


# -- planting one -----------------------------------------------------------------------------------


class _Plant(_Watch):  # type: ignore[no-untyped-call]
    """Alters one call."""

    def __init__(self, mutant: Mutant) -> None:
        super().__init__()
        self._mutant = mutant

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        mutant = self._mutant
        op = name_of(func)
        if mutant.site is None or mutant.kind is None or op != mutant.site.op:
            return func(*args, **kwargs)
        site, _ = self.here(op)
        if (site.line, site.count) != (mutant.site.line, mutant.site.count):
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return self._altered(mutant.kind, op, func, args, kwargs)

    def _altered(self, kind: Kind, op: str, func: Any, args: Any, kwargs: Any) -> Any:
        given = bind(func, args, kwargs)
        with _disable_current_modes():  # shapes and dtypes as they would be; nothing of it is kept
            blank = Call(op, func, given).redo()
        call = Call(op, func, given, blank.dtype, tuple(blank.shape), seed=self._mutant.seed)
        faulty = kind.plant(call) if kind.fits(call) else None
        out = func(*args, **kwargs)
        result = first_tensor(out)
        if faulty is not None and result is not None:
            with _disable_current_modes():
                result.copy_(faulty.detach().reshape(result.shape))
        return out


# -- operations -------------------------------------------------------------------------------------


def first_tensor(out: Any) -> Tensor | None:
    if isinstance(out, Tensor):
        return out
    return out[0] if isinstance(out, tuple | list) and out and isinstance(out[0], Tensor) else None


def is_view(func: Any) -> bool:
    """Whether the result shares memory with an operand that it does not write to."""
    return any(a.alias_info is not None and not a.alias_info.is_write for a in func._schema.arguments)


def _calling_line() -> tuple[int, str]:
    frame = sys._getframe(3)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_OURS):
            return frame.f_lineno, file
        frame = frame.f_back  # type: ignore[assignment]
    return 0, ""
