"""The parent's side of isolation: a fork server per run, a session per fresh child process.

Whatever a candidate does (crash, hang, exit, flood, fork, lie) comes back as a CallRecord in bounded time.
Exceptions from here are about our own machinery only.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from signal import Signals
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from seatrial.errors import InfrastructureError
from seatrial.model import CallRecord, Candidate, OutputSlot, Ran, Value
from seatrial.poison import ALL_BITS
from seatrial.policy import Policy
from seatrial.workers.sandbox import inherited_environment
from seatrial.workers.tensors import Layout, all_bytes, buffer, dtype_named, plain_cpu, window
from seatrial.workers.wire import REPLY_LIMIT, Buffer, Garbled, Gone, Late, Wire

_START_TIMEOUT_S = 120.0  # importing torch on a cold disk
_FORK_TIMEOUT_S = 120.0  # the first use of triton or torch.compile is imported by the server
_END_TIMEOUT_S = 10.0  # killing a process tree
_TRANSFER_BYTES_PER_S = 50e6  # the slowest machine that a call's deadline makes room for
_UIDS = 64
_MAX_TEXT = 8192
_MAX_ITEMS = 64

# Threads do not survive a fork, and compile processes would outlive a call.
_WITHOUT_POOLS = {"OPENBLAS_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}

# Names are given by full path, because `python -I` knows neither the caller's folder nor PYTHONPATH.
_BOOT = """
import json, sys, types
control, scratch, package, places = json.loads(sys.argv[1])
sys.path += [p for p in places if p not in sys.path]
bare = types.ModuleType("seatrial")
bare.__path__ = [package]
sys.modules["seatrial"] = bare
from seatrial.workers.forkserver import main
main(control, scratch)
"""


class ForkServer:
    """One per run: pays for importing torch once, then gives a fresh confined process per `open`.

    A context manager. `scratch_root` is where children get their scratch folders (a new temporary folder
    by default); all of it that is ours is removed at the end. Restarts its process if that is lost.
    """

    _boot = _BOOT

    def __init__(self, *, scratch_root: Path | None = None) -> None:
        self._root = scratch_root
        self._own: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ready: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._opened = 0
        self._uid_of: dict[str, int] = {}
        self._sessions: set[Session] = set()

    def __enter__(self) -> ForkServer:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends every open session and the server, and removes what they left."""
        for session in list(self._sessions):
            session.close()
        self._stop()
        if self._own is not None:
            _remove(self._own)
            self._own = None

    def isolation(self) -> dict[str, str]:
        """What confines a child on this machine, in words, one layer per key.

        Raises InfrastructureError when the fork server cannot be started.
        """
        with self._lock:
            self._await_ready()
        return {str(k): str(v) for k, v in self._ready["isolation"].items()}

    def open(self, candidate: Candidate, *, device: str, policy: Policy, call_mib: int = 0) -> Session:
        """A fresh process with the candidate built and loaded; `Session.loaded` says what became of that.

        `device` is "cpu" or "cuda:N"; `call_mib` is what the inputs and outputs of the largest call take there, which
        is no candidate's doing and is allowed beside the policy's memory. Never raises for what a candidate does. Raises InfrastructureError
        when the fork server cannot be started at all.
        """
        if candidate.not_built:
            return Session.never_started(candidate.not_built, self._forget)
        with self._lock:
            place = self._make_place(candidate)
            line, childs_line = Wire.pair()
            keeper, keepers_line = Wire.pair()
            order = {
                "scratch": str(place),
                "cache": str(self._cache_of(candidate)),
                "uid": self._uid(candidate),
                "memory_mib": policy.memory_mib + call_mib,
                "data_limit": device == "cpu",
                "reads_private": bool(candidate.import_paths),
                "printed_bytes": policy.printed_kib << 10,
                "preload": _will_import(candidate),
            }
            error = self._fork(order, childs_line, keepers_line)
        session = Session(line, keeper, place, policy, self._forget, error)
        self._sessions.add(session)
        session._load(candidate, device)
        return session

    def _forget(self, session: Session) -> None:
        self._sessions.discard(session)

    # --- the server's process ---

    def _start(self) -> None:
        if self._own is None:
            self._own = Path(tempfile.mkdtemp(prefix="seatrial-", dir=self._root)).resolve()
            self._own.chmod(0o711)  # children of another user pass through, and see nothing
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = json.dumps([far.fileno(), str(self._own), str(_package_folder()), _library_folders()])
        with (self._own / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", self._boot, arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=inherited_environment() | _WITHOUT_POOLS,
                cwd="/",
                pass_fds=(far.fileno(),),
                start_new_session=True,
            )
        far.close()
        self._control, self._ready = near, {}

    def _await_ready(self) -> None:
        if self._process is None or self._process.poll() is not None:
            self._stop()
            self._start()
        if not self._ready:
            self._ready = self._receive(_START_TIMEOUT_S)

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        assert self._control is not None
        self._control.settimeout(timeout_s)
        try:
            message = self._control.recv(1 << 16)
        except TimeoutError:
            message = b""
        if not message:
            words = self._last_words()
            self._stop()
            raise InfrastructureError(f"the fork server ended or was silent for {timeout_s:.0f} s; it said: {words}")
        answer = json.loads(message)
        assert isinstance(answer, dict)
        return answer

    def _last_words(self) -> str:
        log = self._own / "server.log" if self._own else None
        return log.read_text(errors="replace")[-2000:].strip() or "nothing" if log and log.exists() else "nothing"

    def _fork(self, order: dict[str, Any], *lines: socket.socket) -> str:
        """Empty when it worked, otherwise why not."""
        self._await_ready()
        assert self._control is not None
        try:
            socket.send_fds(self._control, [json.dumps(order).encode()], [line.fileno() for line in lines])
            return str(self._receive(_FORK_TIMEOUT_S).get("error", ""))
        except (OSError, InfrastructureError) as error:
            self._stop()
            return f"the fork server was lost: {error}"
        finally:
            for line in lines:
                line.close()

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._ready = {}

    # --- folders and users ---

    def _make_place(self, candidate: Candidate) -> Path:
        self._await_ready()
        assert self._own is not None
        self._opened += 1
        return self._private_folder(self._own / f"scratch-{self._opened}", self._uid(candidate))

    def _cache_of(self, candidate: Candidate) -> Path:
        """One per candidate, so that what one of its processes compiled the next one finds."""
        assert self._own is not None
        return self._private_folder(self._own / f"cache-{_digest(candidate)}", self._uid(candidate))

    def _private_folder(self, folder: Path, uid: int | None) -> Path:
        folder.mkdir(mode=0o700, exist_ok=True)
        if uid is not None:
            os.chown(folder, uid, uid)
        return folder

    def _uid(self, candidate: Candidate) -> int | None:
        first = self._ready["uid"]
        if first is None:
            return None
        return int(first) + self._uid_of.setdefault(_digest(candidate), len(self._uid_of) % _UIDS)


def _package_folder() -> Path:
    return Path(__file__).resolve().parent.parent


def _library_folders() -> list[str]:
    """Where the libraries that a child needs were found by this process."""
    specs = (find_spec(name) for name in ("torch", "numpy", "cloudpickle", "triton"))
    return list(dict.fromkeys(str(Path(spec.origin).parent.parent) for spec in specs if spec and spec.origin))


def _digest(candidate: Candidate) -> str:
    told = hashlib.sha256(candidate.pickled)
    for source in candidate.sources:
        told.update(json.dumps([source.path, source.content]).encode())
    told.update(json.dumps([candidate.name, candidate.entry_point]).encode())
    return told.hexdigest()[:24]


def _will_import(candidate: Candidate) -> list[str]:
    """Large packages of ours to trust that the candidate's text mentions: imported once, in the server."""
    text = "\n".join(source.content for source in candidate.sources)
    wanted = ["triton"] if "triton" in text or b"triton" in candidate.pickled else []
    if "torch.compile" in text or "_inductor" in text:
        wanted += ["torch._dynamo", "torch._inductor.compile_fx"]
    return wanted


def _remove(folder: Path) -> None:
    """A folder that a candidate wrote into. `rm` copes with any depth; links are not followed."""
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):
        subprocess.run(["chmod", "-R", "u+rwX", "--", str(folder)], check=False, capture_output=True)
        subprocess.run(["rm", "-rf", "--", str(folder)], check=False, capture_output=True)


class Session:
    """One fresh child process that holds a candidate. A context manager; made by `ForkServer.open`.

    loaded   what became of building and importing it
    alive    whether it can still be called
    """

    loaded: CallRecord

    def __init__(
        self, line: Wire, keeper: Wire, place: Path | None, policy: Policy, forget: Any, error: str = ""
    ) -> None:
        self._line, self._keeper, self._place, self._policy, self._forget = line, keeper, place, policy, forget
        self._end: CallRecord | None = CallRecord(Ran.LOST, error=error) if error else None
        self._over = False
        self.loaded = self._end or CallRecord(Ran.LOST, error="not loaded yet")

    @classmethod
    def never_started(cls, why: str, forget: Any) -> Session:
        """A session without a process, for a candidate that cannot be built."""
        line, far_line = Wire.pair()
        keeper, far_keeper = Wire.pair()
        far_line.close()
        far_keeper.close()
        return cls(line, keeper, None, Policy(), forget, why)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        return self._end is None

    def call(
        self,
        inputs: Sequence[Value],
        outputs: Sequence[OutputSlot],
        *,
        poison: float | None = float("nan"),
        guard: int = ALL_BITS,
        echo: bool = False,
        same_tensors: bool = False,
        timeout_s: float | None = None,
    ) -> CallRecord:
        """One call of the candidate on these inputs, which it gets as fresh copies.

        With `same_tensors` they are kept for the next such call, whose values are written into them where the layouts
        agree, as a program does that loads weights anew: same address, same object, same version.

        `outputs` declares what must come back. `poison` fills the outputs (destination passing) or memory
        that was just freed (return style): NaN, a finite number, or None for zeros. `guard` is the byte in the bands
        around every tensor that is given. `echo` sends the tensor
        inputs back as they stand afterwards. `timeout_s` defaults to the policy's. Never raises for what a
        candidate does; a session that has ended answers `Ran.LOST` with the reason.
        """
        self._notice_end()
        if self._end is not None:
            return CallRecord(Ran.LOST, error=f"the process had ended before this call: {self._end.error}")
        sent = [plain_cpu(v) if isinstance(v, Tensor) else v for v in inputs]
        header = {
            "op": "call",
            "inputs": [Layout.of(v).to_json() if isinstance(v, Tensor) else {"scalar": v} for v in sent],
            "outputs": [{"name": o.name, "shape": o.shape, "dtype": o.dtype} for o in outputs],
            "poison": poison,
            "guard": guard,
            "echo": echo,
            "same_tensors": same_tensors,
        }
        blobs = [buffer(window(v)) for v in sent if isinstance(v, Tensor)]
        received = _Received(outputs, sent if echo else ())
        volume = sum(b.nbytes for b in blobs) + received.nbytes
        return self._exchange(header, blobs, received, timeout_s or self._policy.call_timeout_s, volume)

    def close(self) -> CallRecord:
        """Ends the process and all that it started, and removes its scratch folder.

        The record says how it had ended by itself, or `Ran.RETURNED` when it was still serving.
        """
        self._notice_end()
        if self._end is None:
            self._end = self._finish(Ran.RETURNED, "")
        if not self._over:
            self._over = True
            self._line.close()
            self._keeper.close()
            if self._place is not None:
                _remove(self._place)
            self._forget(self)
        return self._end

    # --- one exchange with the child ---

    def _load(self, candidate: Candidate, device: str) -> None:
        if self._end is not None:
            return
        header = {
            "op": "load",
            "sources": [[s.path, s.content] for s in candidate.sources],
            "entry_point": candidate.entry_point,
            "destination_passing": candidate.destination_passing,
            "import_paths": list(candidate.import_paths),
            "device": device,
            "pickled": len(candidate.pickled),
        }
        self.loaded = self._exchange(
            header, [candidate.pickled], _Received((), ()), self._policy.load_timeout_s, len(candidate.pickled)
        )
        if self._end is None and self.loaded.ran is not Ran.RETURNED:
            self._end = replace(self._finish(self.loaded.ran, self.loaded.error), printed="")

    def _exchange(
        self, header: dict[str, Any], blobs: Sequence[Buffer], received: _Received, timeout_s: float, volume: int
    ) -> CallRecord:
        self._line.deadline = time.monotonic() + timeout_s + volume / _TRANSFER_BYTES_PER_S
        try:
            token = self._line.send(header, blobs)
            reply, _ = self._line.receive(limit=REPLY_LIMIT, token=token)
            record = received.read(reply, self._line)
        except Late:
            self._end = self._finish(Ran.TIMED_OUT, f"no answer within {timeout_s:g} s")
            return self._end
        except Garbled as garbage:
            self._end = self._finish(Ran.CRASHED, f"wrote garbage on the result pipe: {garbage}")
            return self._end
        except Gone:
            self._end = self._finish(None, "")
            return self._end
        return self._with_printed(record)

    def _with_printed(self, record: CallRecord) -> CallRecord:
        if record.ran in (Ran.EXITED, Ran.CRASHED, Ran.LOST):
            self._end = replace(record, printed=self._finish(record.ran, record.error).printed)
            return self._end
        news = self._ask_keeper("printed")
        if news["op"] == "ended":  # it answered and ended at once; the next call will say so
            self._end = _how_it_ended(news, None, "")
            return replace(record, printed=str(news["printed"]))
        facts = dict(record.facts) | {"processes_left": int(news["processes"])}
        return replace(record, printed=str(news["printed"]), facts=facts)

    # --- the keeper ---

    def _ask_keeper(self, op: str) -> dict[str, Any]:
        self._keeper.deadline = time.monotonic() + _END_TIMEOUT_S
        with suppress(Gone, Late):  # it may have said how things ended before it closed; that is still to be read
            self._keeper.send({"op": op})
        return self._hear_keeper()

    def _hear_keeper(self) -> dict[str, Any]:
        try:
            return self._keeper.receive(limit=(self._policy.printed_kib << 13) + REPLY_LIMIT)[0]
        except (Gone, Late, Garbled):
            return {"op": "ended", "status": None, "why": "keeper lost", "printed": ""}

    def _finish(self, ran: Ran | None, error: str) -> CallRecord:
        """Has everything ended; `ran` None means that the process ended by itself and the keeper knows how."""
        if ran is None:
            self._keeper.deadline = time.monotonic() + _END_TIMEOUT_S / 5
            news = self._hear_keeper()
            if news["why"] == "keeper lost":  # the child hung up but lives on
                news = self._ask_keeper("end") | {"hung up": True}
        else:
            news = self._ask_keeper("end")
        while news["op"] != "ended":
            news = self._hear_keeper()
        return _how_it_ended(news, ran, error)

    def _notice_end(self) -> None:
        """Learns of an end that came between two calls."""
        if self._end is None and _readable(self._keeper):
            self._end = self._finish(None, "")


def _readable(wire: Wire) -> bool:
    import select

    return bool(select.select([wire], [], [], 0)[0])


def _how_it_ended(news: dict[str, Any], ran: Ran | None, error: str) -> CallRecord:
    printed = str(news["printed"])
    if news["why"] == "memory":
        return CallRecord(Ran.OUT_OF_MEMORY, error="used more memory than the policy allows", printed=printed)
    if news["why"] == "processes":
        return CallRecord(Ran.CRASHED, error="started more processes than are allowed and was ended", printed=printed)
    if ran is not None:
        return CallRecord(ran, error=error, printed=printed)
    if "hung up" in news:
        return CallRecord(Ran.CRASHED, error="closed the result pipe", printed=printed)
    if news["status"] is None:
        return CallRecord(Ran.LOST, error=f"the process was lost ({news['why'] or 'no status'})", printed=printed)
    code = os.waitstatus_to_exitcode(int(news["status"]))
    if code < 0:
        return CallRecord(Ran.CRASHED, error=f"killed by {_signal_name(-code)}", printed=printed)
    return CallRecord(Ran.EXITED, error=f"left the process with exit code {code}", printed=printed)


def _signal_name(number: int) -> str:
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"


class _Received:
    """What the parent is ready to accept as a reply: so many bytes of these dtypes, and nothing else."""

    def __init__(self, outputs: Sequence[OutputSlot], echoed: Sequence[Any]) -> None:
        self._outputs = [torch.empty(slot.shape or (), dtype=dtype_named(slot.dtype)) for slot in outputs]
        self._echoed = [Layout.of(v).empty() if isinstance(v, Tensor) else None for v in echoed]
        tensors = [*self._outputs, *(e for e in self._echoed if e is not None)]
        self.nbytes = sum(t.untyped_storage().nbytes() for t in tensors)

    def read(self, reply: dict[str, Any], line: Wire) -> CallRecord:
        """The record that the header and the bytes after it make. Raises Garbled, Gone, Late."""
        try:
            ran = Ran(reply["ran"])
        except (KeyError, ValueError) as error:
            raise Garbled("a reply that does not say what became of the call") from error
        record = CallRecord(
            ran,
            breaches=_texts(reply.get("breaches")),
            error=_text(reply.get("error")),
            seconds=_number(reply.get("seconds")),
            facts=_facts(reply.get("facts")),
        )
        if ran is not Ran.RETURNED:
            return record
        outputs = () if record.breaches else tuple(self._outputs)
        for tensor in outputs:
            line.fill(buffer(all_bytes(tensor)))
        for echoed in self._echoed:
            if echoed is not None:
                line.fill(buffer(window(echoed)))
        return replace(record, outputs=outputs, echoed=tuple(self._echoed))


def _text(raw: object) -> str:
    return raw[-_MAX_TEXT:] if isinstance(raw, str) else ""


def _texts(raw: object) -> tuple[str, ...]:
    return tuple(str(item)[:500] for item in raw[:_MAX_ITEMS]) if isinstance(raw, list) else ()


def _number(raw: object) -> float:
    """A finite number of seconds, otherwise NaN."""
    return float(raw) if isinstance(raw, (int, float)) and isfinite(raw) else float("nan")


def _facts(raw: object) -> dict[str, Any]:
    """Only the facts that child.py names, in their own types."""
    said = raw if isinstance(raw, dict) else {}
    facts: dict[str, Any] = {}
    for name in ("threads_started", "patched", "flags_changed", "precision_lowered", "guards_broken"):
        if name in said:
            facts[name] = list(_texts(said[name]))
    if "rng_changed" in said:
        facts["rng_changed"] = bool(said["rng_changed"])
    if "reuses_output" in said:
        facts["reuses_output"] = bool(said["reuses_output"])
    if "stream_lag_s" in said:
        facts["stream_lag_s"] = _number(said["stream_lag_s"])
    native = said.get("native_threads")
    if isinstance(native, list) and len(native) == 2 and all(isinstance(n, int) for n in native):
        facts["native_threads"] = native
    return facts
