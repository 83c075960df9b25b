"""Stands over one child: first process of its PID namespace, or the one that adopts its orphans.

Keeps the tail of what the child prints, so that flooding never blocks and never fills anything; watches
memory and the number of processes; says how the child ended; and ends everything below it when the parent
asks, when the parent is gone, or when the child is gone. Holds no candidate code.
"""

from __future__ import annotations

import fcntl
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from seatrial.workers import linux, sandbox
from seatrial.workers.sandbox import Layers, Place
from seatrial.workers.wire import REPLY_LIMIT, Garbled, Gone, Wire

_TICK_S = 0.05
_READ_AT_ONCE = 1 << 16
_SWEEP_S = 5.0


@dataclass
class _Watch:
    """What the keeper knows of its child."""

    child: int
    whole_namespace: bool  # every process that we can see is below us
    memory_bytes: int
    baseline: int = 0
    status: int | None = None  # wait status, once the child has ended
    why: str = ""  # why we ended it, in one word


def keep(
    place: Place,
    layers: Layers,
    line: socket.socket,
    childs_line: socket.socket,
    printed_bytes: int,
    run_child: Callable[[], NoReturn],
) -> NoReturn:
    """In a freshly cloned process: forks the child, stands over it, never returns."""
    os.setsid()
    linux.die_with_parent()
    if not layers.processes:
        linux.adopt_orphans()
    sandbox.enter_view(layers, place)
    wake, woken = _wake_on_child_end()
    output, to_output = os.pipe()
    child = os.fork()
    if child == 0:
        _only_print_there(to_output, (wake, woken))
        line.close()
        run_child()
    childs_line.close()
    os.close(to_output)
    linux.set_dumpable(dumpable=False)  # its child may not look into it or trace it
    watch = _Watch(child, layers.processes, place.memory_mib << 20)
    tail = _Tail(output, printed_bytes)
    _stand_over(watch, Wire(line), tail, woken)
    end_descendants(whole_namespace=layers.processes)
    tail.drain()
    _say_how_it_ended(Wire(line), watch, tail)
    os._exit(0)


def _wake_on_child_end() -> tuple[int, int]:
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    return wake, woken


def _only_print_there(to_output: int, not_yours: tuple[int, ...]) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for fd in not_yours:
        os.close(fd)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(to_output, 1)
    os.dup2(to_output, 2)


class _Tail:
    """The last bytes that came out of a pipe."""

    def __init__(self, fd: int, limit: int) -> None:
        self.fd, self._limit, self._kept = fd, limit, bytearray()
        os.set_blocking(fd, False)
        with suppress(OSError):  # only a wish: fewer wake-ups while a candidate floods
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _READ_AT_ONCE)

    def read_once(self) -> int:
        """Takes what is there, once; 0 at the end and when there is nothing."""
        try:
            piece = os.read(self.fd, _READ_AT_ONCE)
        except BlockingIOError:
            return 0
        self._kept = (self._kept + piece)[-self._limit :] if self._limit else bytearray()
        return len(piece)

    def drain(self) -> None:
        """Takes what is there, but never more than a full pipe: the other side may be writing."""
        left = 1 << 20
        while left > 0 and (count := self.read_once()):
            left -= count

    def take(self) -> str:
        text, self._kept = self._kept.decode(errors="replace"), bytearray()
        return text


def _stand_over(watch: _Watch, parent: Wire, tail: _Tail, woken: int) -> None:
    """Until the child has ended or must end."""
    with selectors.DefaultSelector() as selector:
        for fd in (parent.fileno(), tail.fd, woken):
            selector.register(fd, selectors.EVENT_READ)
        next_look = 0.0
        while watch.status is None and not watch.why:
            ready = {key.fd for key, _ in selector.select(_TICK_S)}
            if tail.fd in ready and tail.read_once() == 0:
                selector.unregister(tail.fd)
            if parent.fileno() in ready:
                _answer(watch, parent, tail)
            if woken in ready:
                os.read(woken, 4096)
                _reap(watch)
            if time.monotonic() >= next_look:
                _look_for_excess(watch)
                next_look = time.monotonic() + _TICK_S


def _answer(watch: _Watch, parent: Wire, tail: _Tail) -> None:
    try:
        request, token = parent.receive(limit=REPLY_LIMIT)
        if request["op"] == "end":
            watch.why = "asked"
            return
        tail.drain()
        parent.send({"op": "printed", "printed": tail.take(), "processes": _count_others(watch)}, token=token)
    except (Gone, Garbled):
        watch.why = "orphaned"


def _reap(watch: _Watch) -> None:
    """Collects every ended process; the child's status is the one that counts."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid == watch.child:
            watch.status = status


def _look_for_excess(watch: _Watch) -> None:
    members = list(_members(watch))
    if len(members) > sandbox.PROCESS_LIMIT:
        watch.why = "processes"
        return
    sizes = [_own_memory(pid) for pid in members]
    watch.baseline = watch.baseline or max(sizes, default=0)
    if sum(max(0, size - watch.baseline) for size in sizes) > watch.memory_bytes:
        watch.why = "memory"


def _own_memory(pid: int) -> int:
    sizes = sandbox.memory_of(pid)
    if "RssAnon" in sizes:
        return sizes["RssAnon"] + sizes.get("RssShmem", 0)
    return sizes.get("VmRSS", 0)


def _count_others(watch: _Watch) -> int:
    """Processes that run below us besides the child."""
    return sum(1 for pid in _members(watch) if pid != watch.child)


def _members(watch: _Watch) -> Iterator[int]:
    if watch.whole_namespace:
        yield from (int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid())
    else:
        yield from descendants(os.getpid())


def descendants(pid: int) -> Iterator[int]:
    """Every process below `pid`, as far as /proc tells."""
    for child in _children(pid):
        yield child
        yield from descendants(child)


def _children(pid: int) -> list[int]:
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
        return [int(c) for task in tasks for c in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    except OSError:
        return _children_by_parent(pid)


def _children_by_parent(pid: int) -> list[int]:
    """For kernels without lists of children: every process that names `pid` as its parent."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError, IndexError):
            after_name = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2]
            if int(after_name.split()[1]) == pid:
                found.append(int(name))
    return found


def end_descendants(*, whole_namespace: bool) -> None:
    """Kills and reaps all that is below this process."""
    give_up = time.monotonic() + _SWEEP_S
    while time.monotonic() < give_up:
        if whole_namespace:
            _kill(-1)
        else:
            for pid in list(descendants(os.getpid())):
                _kill(pid)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.0005)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return  # ended meanwhile, or (a namespace's -1) nobody is left


def _say_how_it_ended(parent: Wire, watch: _Watch, tail: _Tail) -> None:
    news: dict[str, Any] = {"op": "ended", "status": watch.status, "why": watch.why, "printed": tail.take()}
    try:
        parent.send(news)
    except Gone:
        return
