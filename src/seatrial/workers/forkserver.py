"""A process that has imported torch and forks a fresh child per request, in milliseconds.

Started with `python -I`, a scrubbed environment and nothing of the caller's on its import path. It never
touches CUDA (a context does not survive a fork) and never runs candidate code. Requests come as one
datagram each, with two sockets attached: the child's line to the parent and its keeper's.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import signal
import socket
import sys
from glob import glob
from pathlib import Path
from typing import Any, NoReturn

from seatrial.workers import linux, sandbox
from seatrial.workers.sandbox import Layers, Place

FIRST_UID = 1_900_000_000  # above every range that distributions and container tools hand out
UIDS_PER_SERVER = 64
REQUEST_BYTES = 1 << 16


def main(control_fd: int, scratch_root: str) -> None:
    """Serves until the parent closes the control socket."""
    control = socket.socket(fileno=control_fd)
    linux.die_with_parent()
    linux.set_dumpable(dumpable=True)
    uid = FIRST_UID + (os.getpid() % 1_000_000) * UIDS_PER_SERVER
    layers = sandbox.enter_namespaces(uid, _what_a_child_reads(scratch_root))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended keepers need no burial
    threads = _load_torch()
    control.send(json.dumps({"uid": uid if layers.own_uid else None, "isolation": sandbox.describe(layers)}).encode())
    _serve(control, layers, threads)


def _what_a_child_reads(scratch_root: str) -> list[Path]:
    torch = importlib.util.find_spec("torch")
    return [Path(p) for p in (sys.executable, os.__file__, __file__, torch and torch.origin, scratch_root) if p]


def _load_torch() -> int:
    """Imports what every child needs, without starting a thread pool; returns the usual number of threads."""
    import torch

    from seatrial.workers import child  # noqa: F401  (so that no child has to import it)

    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    _warm_up(torch)
    if glob("/dev/nvidia[0-9]*"):
        preload(["triton"])
    return usual


def _warm_up(torch: Any) -> None:
    """First uses that would otherwise be paid in every child."""
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64):
        torch.ones(2, 2).to(dtype).clone().view(torch.uint8).numpy()
    torch.ones(2, 2) @ torch.ones(2, 2)
    torch.get_rng_state()


def preload(modules: list[str]) -> None:
    """Imports on request what a candidate is going to use. One that fails will fail in the child, with words."""
    for name in modules:
        if name not in sys.modules and importlib.util.find_spec(name.partition(".")[0]) is not None:
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001  (foreign packages raise anything when they lack a GPU)
                print(f"preloading {name}: {error!r}", file=sys.stderr)  # noqa: T201  (the server's log)


def _serve(control: socket.socket, layers: Layers, threads: int) -> None:
    while True:
        message, fds, _, _ = socket.recv_fds(control, REQUEST_BYTES, 2)
        if not message:
            return
        order = json.loads(message)
        preload(order["preload"])
        gc.collect()
        gc.freeze()  # keeps the collector of a child from copying our pages
        try:
            answer: dict[str, Any] = {"pid": _fork(order, fds, control, layers, threads)}
        except OSError as error:
            answer = {"error": f"the fork server could not start a process: {error}"}
        for fd in fds:
            os.close(fd)
        control.send(json.dumps(answer).encode())


def _fork(order: dict[str, Any], fds: list[int], control: socket.socket, layers: Layers, threads: int) -> int:
    pid = linux.clone(layers.clone_flags)
    if pid:
        return pid
    try:
        _become_keeper(order, fds, control, layers, threads)
    except BaseException as error:  # noqa: BLE001  (a forked copy must never run on as a second server)
        os.write(2, f"keeper: {error!r}\n".encode(errors="replace"))
    finally:
        os._exit(1)


def _become_keeper(
    order: dict[str, Any], fds: list[int], control: socket.socket, layers: Layers, threads: int
) -> NoReturn:
    from seatrial.workers import child, keeper

    control.close()
    line, keeper_line = (socket.socket(fileno=fd) for fd in fds)
    place = Place(
        scratch=Path(order["scratch"]),
        cache=Path(order["cache"]),
        uid=order["uid"] or 0,
        memory_mib=order["memory_mib"],
        data_limit=order["data_limit"],
        reads_private=order["reads_private"],
    )

    def run_child() -> NoReturn:
        child.run(line, place, layers, threads)

    keeper.keep(place, layers, keeper_line, line, order["printed_bytes"], run_child)
