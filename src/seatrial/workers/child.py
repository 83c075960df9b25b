"""What runs inside a child: load a candidate, execute calls, send back raw outputs and a few facts.

The child never judges and knows nothing to judge by: no expected value, seed or check is ever here. The
request dictates names, shapes and dtypes of the outputs; whatever does not fit is said in `breaches`.

Facts of a call (all optional, all seen from inside and so no proof of innocence):

    threads_started   names of Python threads that run after the call and did not before
    native_threads    threads of the process before and after, pools of torch and OpenMP included
    reuses_output     whether a result lies in the memory of the last call's result, which is still alive
    processes_left    processes of the candidate's own that still run (counted by the keeper)
    patched           watched functions (observed.WATCHED) that are not what they were before the import
    flags_changed     process-wide settings that are not what they were before the import, one sentence each
    precision_lowered precision settings that were written to a coarser side since the last call, put back or not
    rng_changed       whether torch's random generators moved
    guards_broken     tensors beyond whose ends something was written, "behind output 0", by position: inputs, and
                      outputs that were given as buffers
    stream_lag_s      seconds that other streams still worked after the judged stream had finished

The facts of loading are `patched`, `flags_changed`, `rng_changed` and `threads_started`.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn

import torch
from torch import Tensor

from seatrial.builders.python import BuildFailed, build, in_own_words
from seatrial.devices import Device, pick
from seatrial.poison import perturb_byte
from seatrial.workers import observed, precision, sandbox
from seatrial.workers.guards import Guarded
from seatrial.workers.sandbox import Layers, Place
from seatrial.workers.tensors import (
    Layout,
    all_bytes,
    buffer,
    dtype_named,
    fill_with,
    name_of,
    same_bits,
    window,
)
from seatrial.workers.wire import REQUEST_LIMIT, Buffer, Garbled, Gone, Wire

_MAX_TEXT = 8192
_MAX_ITEMS = 64
_POISONED_BYTES, _MOST_BLOCKS = 1 << 18, 96  # of freed memory per output that is left behind on purpose
_ALIGNMENT_BYTES = 128
_RECURSION_OF_INDUCTOR = 2000
_MALLOPT_MMAP_MAX, _MALLOPT_TRIM_THRESHOLD, _MALLOPT_PERTURB = -4, -1, -6


def run(line: socket.socket, place: Place, layers: Layers, threads: int) -> NoReturn:
    """In a freshly forked process: confine it, then serve until the parent hangs up."""
    wire = Wire(line)
    try:
        sandbox.confine(layers, place)
        _close_everything_but(wire.fileno())
        _fresh_output()
        _keep_freed_memory()
        _settle_compilers(place)
        torch.set_num_threads(threads)
    except BaseException as error:  # noqa: BLE001  (a child that is not confined must not load anything)
        _refuse(wire, f"the child could not be confined: {error!r}")
    with suppress(Gone, Garbled):
        _serve(wire, place)
    os._exit(0)


def _refuse(wire: Wire, why: str) -> NoReturn:
    with suppress(Gone, Garbled):
        _, token = wire.receive(limit=REQUEST_LIMIT)
        wire.send({"ran": "lost", "error": why}, token=token)
    os._exit(1)


def _close_everything_but(kept: int) -> None:
    os.closerange(3, kept)
    os.closerange(kept + 1, 65536)


def _fresh_output() -> None:
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  (they live as long as the process)
    sys.stdout = open(1, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]


def _keep_freed_memory() -> None:
    """Freed blocks stay in the heap with what they held, so that an unwritten output shows as poison."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_MALLOPT_MMAP_MAX, 0)
    libc.mallopt(_MALLOPT_TRIM_THRESHOLD, 2**31 - 1)


def _perturb_allocations(poison: float | None) -> None:
    """From here on the C allocator fills what it hands out and takes back (glibc; others ignore the request)."""
    ctypes.CDLL(None).mallopt(_MALLOPT_PERTURB, perturb_byte(poison))


def _settle_compilers(place: Place) -> None:
    """What torch.compile would do by itself at its first use, or did in the server with the server's folders."""
    sys.setrecursionlimit(max(sys.getrecursionlimit(), _RECURSION_OF_INDUCTOR))
    codecache = sys.modules.get("torch._inductor.codecache")
    if hasattr(codecache, "_HEADER_DIR"):
        headers = place.cache / "precompiled_headers"
        vars(codecache).update(_HEADER_DIR=str(headers), _HEADER_LOCK_DIR=str(headers / "locks"))


# --- serving ---------------------------------------------------------------------------------------


@dataclass
class _Host:
    """The loaded candidate and what its process was like before it."""

    function: Callable[..., Any]
    destination_passing: bool
    device: Device
    originals: observed.Originals
    watch: precision.Watch
    flags: dict[str, str]  # before the import
    source: Path
    previous: Sequence[Tensor] = ()  # what the last call returned, kept alive
    inputs: Sequence[_Input] = ()  # of the last call, where the next one may be asked to use its tensors again


def _serve(wire: Wire, place: Place) -> None:
    request, token = wire.receive(limit=REQUEST_LIMIT)
    pickled = bytearray(request["pickled"])
    wire.fill(pickled)
    host, answer = _load(request, bytes(pickled), place)
    wire.send(answer, token=token)
    while host is not None:
        request, token = wire.receive(limit=REQUEST_LIMIT)
        inputs = [_receive_input(wire, spec, host.device, request["guard"]) for spec in request["inputs"]]
        if request["same_tensors"]:
            inputs = _in_the_last_ones(inputs, host.inputs)
        host.inputs = inputs if request["same_tensors"] else ()
        answer, blobs = _call(host, request, inputs)
        wire.send(answer, blobs, token=token)
        if answer["ran"] == "exited":
            break


def _load(request: dict[str, Any], pickled: bytes, place: Place) -> tuple[_Host | None, dict[str, Any]]:
    source = place.scratch / "src"
    started = perf_counter()
    try:
        device = pick(request["device"])
        device.prepare()
    except Exception as error:  # noqa: BLE001  (no driver error may look like the candidate's)
        return None, {"ran": "lost", "error": _clip(f"the device {request['device']} is not usable: {error}")}
    originals, watch = observed.Originals(), precision.Watch()
    flags, generators, threads = observed.flags(device), observed.generators(device), observed.live_threads()
    answer: dict[str, Any]
    host = None
    try:
        function = _function(request, pickled, source)
        host = _Host(function, bool(request["destination_passing"]), device, originals, watch, flags, source)
        answer = {"ran": "returned"}
    except BaseException as error:  # noqa: BLE001  (the child boundary: whatever a candidate raises is data)
        answer = _what_was_raised(error, source)
    _flush_prints()
    answer["seconds"] = perf_counter() - started
    answer["facts"] = {
        "patched": originals.patched(),
        "flags_changed": _clip_all(observed.changes(flags, observed.flags(device))),
        "rng_changed": generators != observed.generators(device),
        "threads_started": _started_since(threads),
    }
    return host, answer


def _function(request: dict[str, Any], pickled: bytes, source: Path) -> Callable[..., Any]:
    sys.path.extend(request["import_paths"])
    if not pickled:
        return build([(path, text) for path, text in request["sources"]], request["entry_point"], source)
    import cloudpickle  # type: ignore[import-untyped,unused-ignore]

    function = cloudpickle.loads(pickled)
    if not callable(function):
        raise BuildFailed(f"the pickled candidate is a {type(function).__name__}, not a callable")
    return function  # type: ignore[no-any-return]


def _what_was_raised(error: BaseException, source: Path) -> dict[str, Any]:
    if isinstance(error, SystemExit):
        return {"ran": "exited", "error": _clip(f"called sys.exit({error.code!r})")}
    if isinstance(error, BuildFailed):
        return {"ran": "raised", "error": _clip(str(error))}
    ran = "out-of-memory" if _is_out_of_memory(error) else "raised"
    try:
        words = in_own_words(error, source)
    except BaseException as second:  # noqa: BLE001  (an exception object is candidate code as well)
        words = f"{type(error).__name__}, which cannot be shown: {type(second).__name__}"
    return {"ran": ran, "error": _clip(words)}


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


# --- one call --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Input:
    """An input as the candidate gets it; for tensors also an alias that the candidate does not hold."""

    value: Any
    layout: Layout | None
    alias: Tensor | None
    bands: Guarded | None = None


def _receive_input(wire: Wire, spec: dict[str, Any], device: Device, guard: int) -> _Input:
    if "scalar" in spec:
        return _Input(spec["scalar"], None, None)
    layout = Layout.from_json(spec)
    there, bands = layout.guarded(device.name, guard)
    alias = bands.tensor(there.dtype, layout.shape, layout.strides, layout.offset)
    if device.name == "cpu":
        wire.fill(buffer(window(alias)))
    else:
        here = layout.empty()
        wire.fill(buffer(window(here)))
        window(alias).copy_(window(here))
    return _Input(there, layout, alias, bands)


def _in_the_last_ones(fresh: Sequence[_Input], last: Sequence[_Input]) -> list[_Input]:
    """The new values in the tensors of the last call, written through an alias that leaves their versions alone."""
    made = []
    for now, was in zip(fresh, last, strict=False):
        if now.alias is not None and was.alias is not None and now.layout == was.layout:
            window(was.alias).copy_(window(now.alias))
            made.append(was)
        else:
            made.append(now)
    return [*made, *fresh[len(made) :]]


@dataclass(frozen=True)
class _Destination:
    """An output buffer between two guard bands."""

    name: str
    bands: Guarded
    given: Tensor

    @classmethod
    def make(cls, slot: dict[str, Any], poison: float | None, device: Device, guard: int) -> _Destination:
        shape = tuple(slot["shape"] or ())
        given, bands = Layout(slot["dtype"], shape, _dense(shape), 0).guarded(device.name, guard)
        fill_with(given, poison)
        return cls(slot["name"], bands, given)

    def untouched_view(self) -> Tensor:
        """The buffer by our own address, whatever became of the tensor object that was handed out."""
        return self.bands.content().view(self.given.dtype)


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(tuple(shape), device="meta").stride()


def _broken_bands(inputs: Sequence[_Input], destinations: Sequence[_Destination]) -> list[str]:
    """Where something was written beyond the ends of a tensor."""
    placed = [(f"input {i}", given.bands) for i, given in enumerate(inputs)]
    placed += [(f"output {i}", given.bands) for i, given in enumerate(destinations)]
    sides = [(bands.broken(), name) for name, bands in placed if bands is not None]
    return _clip_all([f"{side} {name}" for side, name in sides if side])


def _call(host: _Host, request: dict[str, Any], inputs: Sequence[_Input]) -> tuple[dict[str, Any], Sequence[Buffer]]:
    device, slots, poison = host.device, request["outputs"], request["poison"]
    destinations: list[_Destination] = []
    try:
        if host.destination_passing:
            destinations = [_Destination.make(slot, poison, device, request["guard"]) for slot in slots]
        else:
            _leave_poison_behind(slots, poison, device)
    except Exception as error:  # noqa: BLE001  (our own preparation, for example too large an output)
        return {"ran": "out-of-memory" if _is_out_of_memory(error) else "lost", "error": _clip(str(error))}, []
    arguments = [i.value for i in inputs] + [d.given for d in destinations]
    given = [(d.given.shape, d.given.data_ptr()) for d in destinations]
    generators, threads = observed.generators(device), observed.live_threads()
    native = observed.native_threads()
    device.synchronise()
    _perturb_allocations(poison if device.name == "cpu" else None)
    started = perf_counter()
    try:
        returned = host.function(*arguments)
        if host.destination_passing:
            taken, breaches = _from_destinations(destinations, given)
        else:
            taken, breaches = _from_return(returned, slots, device)
        outputs = device.snapshot([same_bits(t) for t in taken])
        reused = _shares_memory(taken, host.previous)
        host.previous = () if host.destination_passing else tuple(taken)
        seconds = perf_counter() - started
        lag = device.synchronise()
        answer: dict[str, Any] = {"ran": "returned", "breaches": _clip_all(breaches), "seconds": seconds}
    except BaseException as error:  # noqa: BLE001  (the child boundary: whatever a candidate raises is data)
        outputs, lag, reused = (), 0.0, False
        answer = _what_was_raised(error, host.source) | {"seconds": perf_counter() - started}
        answer |= _is_device_lost(device)
    _perturb_allocations(None)
    _flush_prints()
    if answer["ran"] == "exited" or answer.get("ran") == "crashed":
        return answer, []
    answer["facts"] = {
        "threads_started": _started_since(threads),
        "native_threads": [native, observed.native_threads()],
        "patched": host.originals.patched(),
        "flags_changed": _clip_all(observed.changes(host.flags, observed.flags(device))),
        "precision_lowered": _clip_all(host.watch.lowered()),
        "rng_changed": generators != observed.generators(device),
        "guards_broken": _broken_bands(inputs, destinations),
        "stream_lag_s": lag,
        "reuses_output": reused,
    }
    return answer, _blobs(answer, outputs, inputs if request["echo"] else ())


def _shares_memory(taken: Sequence[Tensor], previous: Sequence[Tensor]) -> bool:
    """Whether a result lies in the memory of the last call's, which is still alive here and so is nobody's to hand out."""
    alive = {t.untyped_storage().data_ptr() for t in previous if t.numel()}
    return any(t.numel() and t.untyped_storage().data_ptr() in alive for t in taken)


def _is_device_lost(device: Device) -> dict[str, Any]:
    """An illegal access ruins a CUDA context for good: such a process can serve no further call."""
    try:
        device.synchronise()
    except Exception as error:  # noqa: BLE001  (torch raises several types here)
        return {"ran": "crashed", "error": _clip(f"the device context is lost: {error}")}
    return {}


def _blobs(answer: dict[str, Any], outputs: Sequence[Tensor], echoed: Sequence[_Input]) -> Sequence[Buffer]:
    if answer["ran"] != "returned":
        return []
    kept = [] if answer["breaches"] else [t.cpu() for t in outputs]
    kept_inputs = [window(i.alias).cpu() for i in echoed if i.alias is not None]
    return [buffer(all_bytes(t)) for t in kept] + [buffer(t) for t in kept_inputs]


def _leave_poison_behind(slots: Sequence[dict[str, Any]], poison: float | None, device: Device) -> None:
    """Blocks of the outputs' sizes are filled and freed: memory that a kernel gets but does not write shows it.

    Exact on CUDA. The CPU's allocator asks for more room than a tensor needs, in order to align it, and has
    many holes for a small one; so several blocks are left, the more the smaller they are. Blocks below some
    hundred bytes may still come from elsewhere.
    """
    blocks = []
    for slot in slots:
        dtype = dtype_named(slot["dtype"])
        count = torch.Size(slot["shape"] or ()).numel()
        many = min(_POISONED_BYTES // (count * dtype.itemsize + 1), _MOST_BLOCKS)
        pattern = torch.empty(count + _ALIGNMENT_BYTES // dtype.itemsize, dtype=dtype, device=device.name)
        fill_with(pattern, poison)
        pattern = same_bits(pattern)
        blocks += [pattern, *(pattern.clone() for _ in range(many)), pattern[:count].clone()]
    device.synchronise()


# --- the contract of outputs -----------------------------------------------------------------------


def _from_destinations(
    destinations: Sequence[_Destination], given: Sequence[tuple[torch.Size, int]]
) -> tuple[list[Tensor], list[str]]:
    breaches = [
        f"output {d.name!r} was given as a buffer and came back resized or pointing elsewhere"
        for d, was in zip(destinations, given, strict=True)
        if (d.given.shape, d.given.data_ptr()) != was
    ]
    return [d.untouched_view() for d in destinations], breaches


def _from_return(returned: Any, slots: Sequence[dict[str, Any]], device: Device) -> tuple[list[Tensor], list[str]]:
    """The declared outputs out of what was returned, and in which ways it breaks the declaration."""
    values, breaches = _in_order(returned, slots)
    if breaches:
        return [], breaches
    taken = []
    for value, slot in zip(values, slots, strict=True):
        if slot["shape"] is None:
            value, broken = _scalar(value, slot)
        else:
            broken = _tensor_breaches(value, slot, device)
        breaches += broken
        taken.append(value)
    if breaches:
        return [], breaches
    return [_plain(value) for value in taken], []


def _in_order(returned: Any, slots: Sequence[dict[str, Any]]) -> tuple[list[Any], list[str]]:
    names = [slot["name"] for slot in slots]
    if isinstance(returned, dict):
        if set(returned) == set(names):
            return [returned[name] for name in names], []
        return [], [f"the returned dict has the keys {sorted(map(str, returned))}, declared are {sorted(names)}"]
    values = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    if len(values) == len(names):
        return values, []
    return [], [f"{len(values)} outputs were returned, {len(names)} are declared ({', '.join(names)})"]


def _scalar(value: Any, slot: dict[str, Any]) -> tuple[Any, list[str]]:
    dtype = dtype_named(slot["dtype"])
    if type(value) is Tensor:
        if value.dim() == 0:
            return value.to(dtype), []
        return value, [
            f"output {slot['name']!r} is declared a scalar and came as a tensor of shape {list(value.shape)}"
        ]
    if type(value) not in (int, float, bool):
        return value, [f"output {slot['name']!r} is declared a scalar and came as {_described(value)}"]
    try:
        return torch.tensor(value, dtype=torch.float64 if type(value) is float else None, device="cpu").to(dtype), []
    except (RuntimeError, OverflowError):
        return value, [f"output {slot['name']!r} is {value!r}, which {slot['dtype']} cannot hold"]


def _tensor_breaches(value: Any, slot: dict[str, Any], device: Device) -> list[str]:
    name = f"output {slot['name']!r}"
    if type(value) is not Tensor:
        if isinstance(value, Tensor):
            return [f"{name} is {_described(value)}, a lazy output: a subclass of torch.Tensor instead of a plain one"]
        return [f"{name} is declared a tensor and came as {_described(value)}"]
    breaches = []
    if value.layout is not torch.strided:
        breaches.append(f"{name} has the layout {value.layout}, a dense tensor is declared")
    if list(value.shape) != slot["shape"]:
        breaches.append(f"{name} has shape {list(value.shape)}, declared is {slot['shape']}")
    if name_of(value.dtype) != slot["dtype"]:
        breaches.append(f"{name} is {name_of(value.dtype)}, declared is {slot['dtype']}")
    if str(value.device) != device.name:
        breaches.append(f"{name} lies on {value.device}, not on {device.name}")
    return breaches


def _described(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _plain(value: Tensor) -> Tensor:
    value = value.detach()
    return value.resolve_conj().resolve_neg() if value.is_conj() or value.is_neg() else value


# --- small print -----------------------------------------------------------------------------------


def _started_since(before: dict[int, str]) -> list[str]:
    return _clip_all([name for key, name in observed.live_threads().items() if key not in before])


def _flush_prints() -> None:
    """So that what was printed before the answer arrives before the answer."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # noqa: BLE001  (the candidate may have closed or replaced it: its loss)
            continue
    ctypes.CDLL(None).fflush(None)


def _clip(text: str) -> str:
    return text[-_MAX_TEXT:].encode(errors="replace").decode()


def _clip_all(texts: Sequence[str]) -> list[str]:
    return [text[:500].encode(errors="replace").decode() for text in texts[:_MAX_ITEMS]]
