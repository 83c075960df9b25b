"""Isolation and the wire: crash, hang, exit, fork, flood, lie. Each fault stands beside its honest twin."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import cloudpickle  # type: ignore[import-untyped,unused-ignore]
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from seatrial.devices import pick
from seatrial.model import CallRecord, Candidate, OutputSlot, Ran, SourceFile
from seatrial.poison import ALL_BITS, OTHER_BITS, allocator_fills
from seatrial.policy import Policy
from seatrial.workers.process import ForkServer, Session
from seatrial.workers.tensors import Layout, all_bytes, buffer, dtype_named, fill_with, window

POLICY = Policy(load_timeout_s=20.0, call_timeout_s=10.0, memory_mib=512, printed_kib=8)
TWO = OutputSlot("y", (2,), "float32")
NAN = float("nan")
NAP = str(10_000_000 + os.getpid())  # seconds; tells the sleepers of this test run from all others

DTYPES = [
    "float64", "float32", "float16", "bfloat16",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
    "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool", "complex64", "complex128",
]  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as running:
        yield running


def candidate(source: str, more: Sequence[tuple[str, str]] = (), *, dps: bool = False) -> Candidate:
    """`more` are further source files: path and text."""
    files = [SourceFile("kernel.py", textwrap.dedent(source).replace("NAP", repr(NAP)))]
    files += [SourceFile(path, text) for path, text in more]
    return Candidate("c", ("pytorch",), "kernel.py::run", dps, tuple(files))


def opened(server: ForkServer, source: str, *, policy: Policy = POLICY, dps: bool = False) -> Session:
    return server.open(candidate(source, dps=dps), device="cpu", policy=policy)


def once(
    server: ForkServer,
    source: str,
    inputs: Sequence[Tensor | float] = (),
    outputs: Sequence[OutputSlot] = (TWO,),
    *,
    policy: Policy = POLICY,
    dps: bool = False,
    poison: float | None = NAN,
    echo: bool = False,
    guard: int = ALL_BITS,
) -> CallRecord:
    with opened(server, source, policy=policy, dps=dps) as session:
        assert session.loaded.ran is Ran.RETURNED, session.loaded
        return session.call(inputs, outputs, poison=poison, echo=echo, guard=guard)


def bits(tensor: Tensor) -> bytes:
    return bytes(buffer(all_bytes(tensor.contiguous().clone())))


def _uses_a_helper(x: Tensor) -> Tensor:
    import seatrial_test_helper  # type: ignore[import-not-found]

    return x * int(seatrial_test_helper.FACTOR)


cloudpickle.register_pickle_by_value(sys.modules[__name__])

HONEST = "import torch\ndef run(*a): return torch.tensor([1.0, 2.0])\n"


def test_an_honest_candidate_returns_its_output(server: ForkServer) -> None:
    record = once(server, HONEST)
    assert record.usable and record.outputs[0].tolist() == [1.0, 2.0]
    assert record.error == "" and record.printed == "" and record.seconds >= 0
    facts = record.facts
    assert not any(facts[k] for k in ("threads_started", "patched", "flags_changed", "rng_changed", "processes_left"))


def test_a_pickled_callable_is_served(server: ForkServer) -> None:
    pickled = Candidate("c", ("python",), "", False, pickled=cloudpickle.dumps(lambda x, n: x * n))
    with server.open(pickled, device="cpu", policy=POLICY) as session:
        assert session.call([torch.ones(2), 3], [TWO]).outputs[0].tolist() == [3.0, 3.0]


def test_a_pickled_callable_finds_its_own_modules(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "seatrial_test_helper.py").write_text("FACTOR = 5\n")
    tmp_path.chmod(0o700)  # where another user could not read
    pickled = Candidate("c", ("python",), "", False, pickled=cloudpickle.dumps(_uses_a_helper))
    with server.open(replace(pickled, import_paths=(str(tmp_path),)), device="cpu", policy=POLICY) as session:
        assert session.call([torch.ones(2)], [TWO]).outputs[0].tolist() == [5.0, 5.0]
    with server.open(pickled, device="cpu", policy=POLICY) as session:
        assert "seatrial_test_helper" in session.call([torch.ones(2)], [TWO]).error


def test_a_candidate_that_cannot_be_built_is_said_to_be_lost(server: ForkServer) -> None:
    session = server.open(replace(candidate(HONEST), not_built="C++ is not built yet"), device="cpu", policy=POLICY)
    assert not session.alive and session.loaded.ran is Ran.LOST and "C++" in session.loaded.error
    assert session.call([], [TWO]).ran is Ran.LOST
    session.close()


# --- how a process may end -------------------------------------------------------------------------

ENDINGS = {
    "import os\ndef run(): os._exit(0)": (Ran.EXITED, "exit code 0"),
    "import sys\ndef run(): sys.exit(3)": (Ran.EXITED, "sys.exit(3)"),
    "import ctypes\ndef run(): ctypes.string_at(0)": (Ran.CRASHED, "SIGSEGV"),
    "import os\ndef run(): os.kill(os.getpid(), 9)": (Ran.CRASHED, "SIGKILL"),
    "import os\ndef run(): os.abort()": (Ran.CRASHED, "SIGABRT"),
    "def run():\n    while True: pass": (Ran.TIMED_OUT, "0.5 s"),
    "import os, signal\ndef run():\n    signal.pthread_sigmask(0, range(1, 65))\n    while True: pass": (Ran.TIMED_OUT, ""),
}  # fmt: skip


@pytest.mark.parametrize("source", ENDINGS)
def test_every_ending_is_a_record_and_the_server_lives_on(server: ForkServer, source: str) -> None:
    ran, words = ENDINGS[source]
    with opened(server, source) as session:
        assert session.alive
        record = session.call([], [TWO], timeout_s=0.5)
        assert record.ran is ran and words in record.error
        assert not session.alive and not record.outputs
        after = session.call([], [TWO])
        assert after.ran is Ran.LOST and record.error in after.error
        assert session.close().ran is ran
    assert once(server, HONEST).usable


LOADS = {
    "def run(:": (Ran.RAISED, "SyntaxError"),
    "import no_such_module": (Ran.RAISED, "no_such_module"),
    "def other(): pass": (Ran.RAISED, "'run'"),
    "raise ValueError('own words')": (Ran.RAISED, "own words"),
    "import os; os._exit(5)": (Ran.EXITED, "exit code 5"),
    "import time; time.sleep(60)": (Ran.TIMED_OUT, "0.5 s"),
    "import os; os.kill(os.getpid(), 11)": (Ran.CRASHED, "SIGSEGV"),
}


@pytest.mark.parametrize("source", LOADS)
def test_what_goes_wrong_while_loading_is_told_in_loaded(server: ForkServer, source: str) -> None:
    ran, words = LOADS[source]
    with opened(server, source, policy=replace(POLICY, load_timeout_s=0.5)) as session:
        assert session.loaded.ran is ran and words in session.loaded.error
        assert not session.alive and session.call([], [TWO]).ran is Ran.LOST


def test_an_exception_is_told_in_the_candidates_own_lines_and_the_process_lives_on(server: ForkServer) -> None:
    source = "import torch\ndef run(x):\n    if x.sum() < 0: raise ValueError('negative')\n    return x\n"
    with opened(server, source) as session:
        record = session.call([-torch.ones(2)], [TWO])
        assert record.ran is Ran.RAISED
        assert 'File "kernel.py", line 3, in run' in record.error and "ValueError: negative" in record.error
        assert "seatrial" not in record.error and "scratch" not in record.error
        assert session.alive and session.call([torch.ones(2)], [TWO]).usable


def test_an_exception_that_cannot_be_shown_is_still_a_record(server: ForkServer) -> None:
    source = "class E(Exception):\n    def __str__(self): raise self\ndef run(): raise E()\n"
    assert once(server, source).ran is Ran.RAISED


def test_a_process_that_dies_between_two_calls_is_noticed(server: ForkServer) -> None:
    source = """
        import os, threading, time, torch
        def run():
            threading.Timer(0.1, lambda: os._exit(7)).start()
            return torch.ones(2)
    """
    with opened(server, source) as session:
        assert session.call([], [TWO]).usable
        time.sleep(0.4)
        assert not session.call([], [TWO]).usable
        assert not session.alive and session.close().ran is Ran.EXITED


def test_eaten_memory_is_out_of_memory_and_a_modest_need_is_served(server: ForkServer) -> None:
    source = "import torch\ndef run(n):\n    block = torch.ones(int(n) << 18)\n    return block[:2]\n"
    with opened(server, source) as session:
        assert session.call([900], [TWO]).ran is Ran.OUT_OF_MEMORY
        assert session.alive and session.call([64], [TWO]).usable


def test_memory_that_the_kernel_does_not_count_is_watched(server: ForkServer) -> None:
    source = """
        import mmap, time, torch
        def run(mib):
            shared = mmap.mmap(-1, int(mib) << 20)
            for i in range(0, int(mib)): shared[i << 20:(i + 1) << 20] = b'x' * (1 << 20)
            time.sleep(0.3)
            return torch.ones(2)
    """
    with opened(server, source) as session:
        assert session.call([64], [TWO]).usable
        assert session.call([700], [TWO]).ran is Ran.OUT_OF_MEMORY


# --- what it prints --------------------------------------------------------------------------------


def test_prints_come_back_with_their_call(server: ForkServer) -> None:
    source = "import os, torch\ndef run(n):\n    print('python', n)\n    os.system(f'echo shell {n}')\n    return torch.ones(2)\n"
    with opened(server, "print('loading')\n" + textwrap.dedent(source)) as session:
        assert session.loaded.printed == "loading\n"
        assert session.call([1], [TWO]).printed.split("\n")[:2] in (["python 1", "shell 1"], ["shell 1", "python 1"])
        assert "1" not in session.call([2], [TWO]).printed


def test_a_flood_blocks_nothing_and_only_its_tail_is_kept(server: ForkServer) -> None:
    source = "import torch\ndef run(n):\n    for i in range(int(n)): print('x' * 9999, i)\n    return torch.ones(2)\n"
    record = once(server, source, [2000])
    assert record.usable and record.printed.endswith("x 1999\n")
    assert len(record.printed) <= POLICY.printed_kib << 10


def test_printing_without_end_is_a_timeout(server: ForkServer) -> None:
    with opened(server, "def run():\n    while True: print('y' * 4096)\n") as session:
        started = time.monotonic()
        record = session.call([], [TWO], timeout_s=0.5)
        assert record.ran is Ran.TIMED_OUT and "yyyy" in record.printed
        assert time.monotonic() - started < 5


# --- what it may reach -----------------------------------------------------------------------------

VANDAL = """
    import os, pathlib, torch
    def run():
        here = os.getcwd()
        done = []
        for top in FOLDERS:
            folders = [top] + [str(p) for p in pathlib.Path(top).glob('*') if p.is_dir() and str(p) != '/proc'][:20]
            for folder in folders:
                for act in (
                    lambda: open(folder + '/vandal', 'w').close(),
                    lambda: os.mkdir(folder + '/vandals'),
                    lambda: os.chmod(folder, 0o777),
                    lambda: os.utime(folder),
                    *[lambda p=p: os.remove(p) for p in map(str, pathlib.Path(folder).glob('witness*'))],
                    *[lambda p=p: open(p, 'a').write('!') for p in map(str, pathlib.Path(folder).glob('witness*'))],
                    *[lambda p=p: os.chmod(p, 0) for p in map(str, pathlib.Path(folder).glob('witness*'))],
                ):
                    try:
                        act()
                        done.append(folder)
                    except OSError:
                        pass
        open(here + '/mine', 'w').close()
        os.mkdir(os.environ['HOME'] + '/mine')
        print(sorted(set(done)))
        return torch.tensor([float(len(done)), float(os.path.exists(here + '/mine'))])
"""


def test_it_writes_into_its_own_folders_only(server: ForkServer, tmp_path: Path) -> None:
    assert_writes_stay_inside(server, tmp_path, VANDAL)


def assert_writes_stay_inside(server: ForkServer, tmp_path: Path, vandal: str) -> None:
    witnesses = [tmp_path, Path("/dev/shm") / f"seatrial-witness-{os.getpid()}", Path.home() / ".seatrial-witness"]
    for folder in witnesses:
        folder.mkdir(exist_ok=True)
        (folder / "witness").write_text("untouched")
        (folder / "witness").chmod(0o666)
        folder.chmod(0o777)
    before = [_snapshot(folder) for folder in witnesses]
    repository = Path(__file__).parent.parent
    reach = [
        "/",
        "/etc",
        "/proc/sys/kernel",
        "/tmp",
        "/dev/shm",
        "/var/tmp",
        str(repository),
        str(Path.cwd()),
        str(Path.home()),
    ]
    reach += map(str, witnesses)
    try:
        record = once(server, vandal.replace("FOLDERS", repr(reach)))
        assert record.usable, record
        assert record.outputs[0].tolist() == [0.0, 1.0], record.printed
        assert [_snapshot(folder) for folder in witnesses] == before
        assert not list(repository.rglob("vandal*")) and not Path("/tmp/vandal").exists()
    finally:
        for folder in witnesses[1:]:
            shutil.rmtree(folder)


def _snapshot(folder: Path) -> list[tuple[str, int, int, int, bytes]]:
    return [
        (str(p), p.stat().st_mode, p.stat().st_uid, p.stat().st_mtime_ns, p.read_bytes() if p.is_file() else b"")
        for p in (folder, *sorted(folder.rglob("*")))
    ]


def test_another_childs_scratch_is_out_of_reach(server: ForkServer) -> None:
    show = "import os\ndef run():\n    print(os.getcwd())\n"
    with opened(server, show) as first:
        scratch = first.call([], []).printed.strip()
        source = f"import torch\ndef run():\n    open({scratch + '/x'!r}, 'w')\n    return torch.ones(2)\n"
        assert once(server, source).ran is Ran.RAISED
        assert Path(scratch).is_dir() and not (Path(scratch) / "x").exists()
    assert not Path(scratch).exists(), "a closed session leaves nothing behind"


def test_two_processes_of_one_candidate_share_a_cache(server: ForkServer) -> None:
    source = """
        import os, torch
        folder = os.environ['TRITON_CACHE_DIR']
        def run():
            there = os.path.exists(folder + '/compiled')
            os.makedirs(folder, exist_ok=True)
            open(folder + '/compiled', 'w').close()
            return torch.full((2,), float(there))
    """
    assert once(server, source).outputs[0].tolist() == [0.0, 0.0]
    assert once(server, source).outputs[0].tolist() == [1.0, 1.0]
    assert once(server, source + "    # another candidate\n").outputs[0].tolist() == [0.0, 0.0]


def test_the_parents_secrets_are_not_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEATRIAL_TEST_SECRET", "xyzzy-secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    source = """
        import glob, os, torch
        def run():
            found = 0
            for path in ['/proc/self/environ', *glob.glob('/proc/[0-9]*/environ')]:
                try:
                    found += b'xyzzy-secret' in open(path, 'rb').read()
                except OSError:
                    pass
            print(sorted(os.environ))
            return torch.tensor([float(found), float('CUDA_VISIBLE_DEVICES' in os.environ)])
    """
    with ForkServer() as own:
        record = once(own, source.replace("glob.glob('/proc/[0-9]*/environ')", f"'/proc/{os.getpid()}/environ'"))
        assert record.outputs[0].tolist() == [0.0, 1.0] and "SEATRIAL_TEST_SECRET" not in record.printed
        assert "xyzzy-secret" in Path("/proc/self/environ").read_text() or os.environ["SEATRIAL_TEST_SECRET"]


def test_it_can_signal_and_trace_nobody(server: ForkServer) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    source = """
        import ctypes, os, torch
        def run(*victims):
            hit = 0
            for pid in (os.getppid(), *map(int, victims)):
                try:
                    os.kill(pid, 9)  # to the first process of a namespace: allowed, and without effect
                except OSError:
                    pass
                hit += ctypes.CDLL(None).ptrace(16, pid, 0, 0) == 0
            return torch.tensor([float(hit), 0.0])
    """
    try:
        with opened(server, source) as session:
            record = session.call([sleeper.pid, os.getpid()], [TWO])
            assert record.usable and record.outputs[0][0] == 0
            assert sleeper.poll() is None
            assert session.call([], [TWO]).usable
    finally:
        sleeper.kill()
        sleeper.wait()


def test_descendants_end_with_the_session(server: ForkServer) -> None:
    source = """
        import os, subprocess, torch
        def run():
            subprocess.run(['true'], check=True)
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    os.execvp('sleep', ['sleep', NAP])
                os._exit(0)
            os.wait()
            return torch.ones(2)
    """
    with opened(server, source) as session:
        record = session.call([], [TWO])
        assert record.usable and record.facts["processes_left"] == 1
        _wait_until(lambda: len(_sleepers()) == 1)
    assert _sleepers() == []


def _sleepers() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes() == b"sleep\0%s\0" % NAP.encode():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def test_a_fork_bomb_ends_and_a_few_processes_do_not_matter(server: ForkServer) -> None:
    source = """
        import os, time, torch
        def run(n):
            for _ in range(int(n)):
                if os.posix_spawnp('sleep', ['sleep', NAP], os.environ) == 0: break
            time.sleep(0.3)
            return torch.ones(2)
    """
    with opened(server, source) as session:
        assert session.call([3], [TWO]).facts["processes_left"] == 3
        record = session.call([600], [TWO])
        assert record.ran is Ran.CRASHED and "processes" in record.error
    assert _sleepers() == []


def test_there_is_no_network(server: ForkServer) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()
        source = "import socket, torch\ndef run(port):\n    socket.create_connection(('127.0.0.1', int(port)), 1)\n"
        assert once(server, source, [port]).ran is Ran.RAISED


def test_isolation_is_reported_in_words(server: ForkServer) -> None:
    words = server.isolation()
    assert {"files", "processes", "network", "user", "environment", "memory", "limits"} == set(words)


def test_no_judging_code_and_no_path_of_ours_is_in_the_child(server: ForkServer, tmp_path: Path) -> None:
    source = """
        import sys, torch
        def run():
            print(*sorted(m for m in sys.modules if m.startswith('seatrial')))
            print('PATH', *sys.path)
            return torch.ones(2)
    """
    printed = once(server, source).printed
    ours = printed.split("PATH")[0].split()
    assert "seatrial.workers.child" in ours
    assert not [
        m for m in ours if m.startswith(("seatrial.numerics", "seatrial.checks", "seatrial.judge", "seatrial.trials"))
    ]
    assert "seatrial.model" not in ours
    assert str(Path.cwd()) not in printed.split("PATH")[1].split()


# --- names -----------------------------------------------------------------------------------------


def test_sources_shadow_nothing_and_reach_each_other(server: ForkServer) -> None:
    bad = "raise RuntimeError('shadowed')"
    source = """
        import json, random, secrets, torch, numpy, seatrial
        import helper
        from pack.inner import three
        from . import helper as same
        def run():
            random.random(), secrets.token_hex(), json.dumps(1)
            return torch.tensor([float(helper.two()), float(three + same.two())])
    """
    names = ("torch", "secrets", "random", "json", "numpy", "seatrial")
    files = [(f"{name}.py", bad) for name in names]
    files += [("helper.py", "def two(): return 2"), ("pack/inner.py", "three = 3")]
    with server.open(candidate(source, files), device="cpu", policy=POLICY) as session:
        assert session.loaded.ran is Ran.RETURNED, session.loaded
        assert session.call([], [TWO]).outputs[0].tolist() == [2.0, 5.0]


@pytest.mark.parametrize("name", ["torch.py", "secrets.py", "seatrial.py", "my-kernel.py", "kernel.v2.py", "a/b.py"])
def test_an_entry_file_may_have_any_name(server: ForkServer, name: str) -> None:
    source = (
        "import inspect, torch\ndef run(): return torch.tensor([1.0, float(len(inspect.getsourcelines(run)[0]))])\n"
    )
    odd = Candidate("c", ("python",), f"{name}::run", False, (SourceFile(name, source),))
    with server.open(odd, device="cpu", policy=POLICY) as session:
        assert session.loaded.ran is Ran.RETURNED, session.loaded
        assert session.call([], [TWO]).outputs[0].tolist() == [1.0, 1.0]


def test_a_source_path_cannot_leave_the_folder(server: ForkServer) -> None:
    escaping = Candidate("c", ("python",), "../k.py::run", False, (SourceFile("../k.py", HONEST),))
    with server.open(escaping, device="cpu", policy=POLICY) as session:
        assert session.loaded.ran is Ran.RAISED and "leaves" in session.loaded.error


# --- the result pipe -------------------------------------------------------------------------------

ON_THE_PIPE = """
    import os, socket, struct, torch
    def sockets():
        return [fd for fd in range(3, 64) if os.path.exists(f'/proc/self/fd/{fd}') and 'socket' in os.readlink(f'/proc/self/fd/{fd}')]
    def run():
        for fd in sockets(): ACT
        return torch.ones(2)
"""


@pytest.mark.parametrize(
    "act",
    [
        "os.write(fd, b'garbage' * 99)",
        "os.write(fd, b'strl' + bytes(16) + struct.pack('!I', 1 << 31))",
        "os.write(fd, b'strl' + bytes(16) + struct.pack('!I', 4) + b'null')",
        "os.close(fd)",
        "socket.socket(fileno=os.dup(fd)).shutdown(2)",
    ],
)
def test_garbage_on_the_result_pipe_is_survived(server: ForkServer, act: str) -> None:
    with opened(server, ON_THE_PIPE.replace("ACT", act)) as session:
        record = session.call([], [TWO], timeout_s=2.0)
        assert record.ran in (Ran.CRASHED, Ran.EXITED) and not record.outputs
        assert "pipe" in record.error or "exit code" in record.error
    assert once(server, ON_THE_PIPE.replace("ACT", "pass")).usable


def test_only_one_descriptor_is_open_in_the_child(server: ForkServer) -> None:
    source = "import os, torch\ndef run(): return torch.tensor([float(len(os.listdir('/proc/self/fd'))), 0.])\n"
    assert once(server, source).outputs[0][0] <= 5  # 0, 1, 2, the pipe, and the listing itself


# --- tensors on the wire ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_crosses_both_ways_bit_by_bit(server: ForkServer, name: str) -> None:
    dtype = dtype_named(name)
    raw = torch.randint(0, 2 if name == "bool" else 256, (6 * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(dtype).view(2, 3)
    scalar, empty = tensor[0, 0].clone(), tensor[:0].clone()
    inputs = [tensor, scalar, empty]
    slots = [OutputSlot(n, tuple(t.shape), name) for n, t in zip("abc", inputs, strict=True)]
    with opened(server, "def run(*a): return a\n") as session:
        record = session.call(inputs, slots, echo=True)
        assert record.usable, record
        for sent, got, echoed in zip(inputs, record.outputs, record.echoed, strict=True):
            assert got.dtype is dtype and got.shape == sent.shape and bits(got) == bits(sent)
            assert echoed is not None and bits(echoed) == bits(sent)


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    dtype = dtype_named(draw(st.sampled_from(DTYPES)))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    strides = draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)))
    offset = draw(st.integers(0, 40))
    reach = 1 + offset + sum(max(0, s - 1) * t for s, t in zip(shape, strides, strict=True))
    raw = torch.arange(reach * dtype.itemsize).to(torch.uint8) % 2
    return raw.view(dtype).as_strided(shape, strides, offset)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(view=views())
def test_a_layout_arrives_exactly_as_it_was(mirror: Session, view: Tensor) -> None:
    record = mirror.call(
        [view], [OutputSlot("y", tuple(view.shape), str(view.dtype).removeprefix("torch."))], echo=True
    )
    assert record.usable, record
    assert eval(record.printed) == [list(view.stride()), view.storage_offset()]
    assert bits(record.outputs[0]) == bits(view)
    echoed = record.echoed[0]
    assert echoed is not None and echoed.stride() == view.stride()
    assert bytes(buffer(window(echoed))) == bytes(buffer(window(view)))


@pytest.fixture(scope="module")
def mirror(server: ForkServer) -> Iterator[Session]:
    with opened(server, "def run(x):\n    print([list(x.stride()), x.storage_offset()])\n    return x\n") as session:
        yield session


def test_a_small_view_of_a_huge_tensor_stays_small() -> None:
    view = torch.empty(1 << 20)[(1 << 20) - 5 :: 2]
    layout = Layout.of(view)
    assert layout.nbytes == 20 and layout.offset < 9000 and layout.offset % 64 == view.storage_offset() % 64


def test_scalars_cross_exactly(server: ForkServer) -> None:
    source = "def run(*a):\n    print(repr(a))\n    return list(a)\n"
    slots = [OutputSlot("a", None, "int64"), OutputSlot("b", None, "float64"), OutputSlot("c", None, "bool")]
    record = once(server, source, [2**53 + 1, 0.1, True], slots)
    assert record.printed == f"({2**53 + 1}, 0.1, True)\n"
    assert [(o.item(), o.dim(), o.dtype) for o in record.outputs] == [
        (2**53 + 1, 0, torch.int64),
        (0.1, 0, torch.float64),
        (True, 0, torch.bool),
    ]
    assert once(server, source, [float("inf")], [OutputSlot("b", None, "bfloat16")]).outputs[0].item() == float("inf")


def test_inputs_are_fresh_for_every_call_and_echo_shows_what_was_done_to_them(server: ForkServer) -> None:
    spoil = "def run(x, n):\n    x += 1\n    return x * 1\n"
    with opened(server, spoil) as session:
        mine = torch.zeros(2)
        first, second = (session.call([mine, 1.0], [TWO], echo=True) for _ in range(2))
        assert first.outputs[0].tolist() == second.outputs[0].tolist() == [1.0, 1.0] and mine.tolist() == [0.0, 0.0]
        assert first.echoed[0] is not None and first.echoed[0].tolist() == [1.0, 1.0] and first.echoed[1] is None
    kept = once(server, spoil.replace("x += 1", "x = x + 1"), [torch.zeros(2), 1.0], echo=True)
    assert kept.echoed[0] is not None and kept.echoed[0].tolist() == [0.0, 0.0]


def test_large_tensors_cross(server: ForkServer) -> None:
    big = torch.randn(1 << 22)
    record = once(server, "def run(x): return x * 2\n", [big], [OutputSlot("y", (1 << 22,), "float32")])
    assert torch.equal(record.outputs[0], big * 2)


# --- poison ----------------------------------------------------------------------------------------


def shows(values: torch.Tensor, poison: float, *, own_memory: bool) -> torch.Tensor:
    """Mask of the elements that still hold the poison, or the allocator's bytes in memory of the kernel's own."""
    found = torch.isnan(values) if poison != poison else values == poison
    raw = values.contiguous().reshape(-1).view(torch.uint8).reshape(*values.shape, values.element_size())
    fills = allocator_fills(poison) if own_memory else ()
    return found | torch.stack([(raw == fill).all(-1) for fill in fills] or [torch.zeros_like(found)]).any(0)


@pytest.mark.parametrize("shape", [(3,), (64, 64), (512, 700)])
@pytest.mark.parametrize("poison", [NAN, 1234.5])
def test_what_a_kernel_does_not_write_shows_poison(server: ForkServer, shape: tuple[int, ...], poison: float) -> None:
    slots = [OutputSlot("y", shape, "float32")]
    fill = "y[1:] = 7.0"
    passing = f"def run(x, y): {fill}\n"
    returning = f"import torch\ndef run(x):\n    y = torch.empty({shape})\n    {fill}\n    return y\n"
    for dps, source in ((True, passing), (False, returning)):
        record = once(server, source, [torch.ones(4)], slots, dps=dps, poison=poison)
        unwritten, written = record.outputs[0][0], record.outputs[0][1:]
        assert bool(shows(unwritten, poison, own_memory=not dps).all())
        assert bool((written == 7.0).all())
        honest = once(server, source.replace("y[1:]", "y[:]"), [torch.ones(4)], slots, dps=dps, poison=poison)
        assert bool((honest.outputs[0] == 7.0).all())


def test_no_poison_means_zeros(server: ForkServer) -> None:
    assert once(server, "def run(y): pass\n", dps=True, poison=None).outputs[0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", DTYPES)
def test_two_poisons_differ_in_every_dtype(name: str) -> None:
    one, other, zero = (torch.empty(3, dtype=dtype_named(name)) for _ in range(3))
    fill_with(one, NAN)
    fill_with(other, 3.0)
    fill_with(zero, None)
    assert bits(one) != bits(other) and not any(bits(zero))
    if one.is_floating_point() and "float4" not in name:
        assert torch.isnan(one.to(torch.float64)).all() and not torch.isnan(other.to(torch.float64)).any()


def test_writing_beyond_a_destination_is_noted(server: ForkServer) -> None:
    beyond = "import ctypes\ndef run(y):\n    y.fill_(1)\n    ctypes.memset(y.data_ptr() + y.nbytes, 9, 4)\n"
    assert once(server, beyond, dps=True).facts["guards_broken"] == ["behind output 0"]
    before = beyond.replace("+ y.nbytes", "- 4")
    assert once(server, before, dps=True).facts["guards_broken"] == ["before output 0"]
    assert once(server, beyond.replace("+ y.nbytes", "+ 4"), dps=True).facts["guards_broken"] == []


@pytest.mark.parametrize("place, told", [("- 1", "before"), ("+ 4 * x.numel()", "behind"), ("+ 0", "")])
@pytest.mark.parametrize("offset", [0, 3])
def test_writing_beyond_an_input_is_noted(server: ForkServer, place: str, told: str, offset: int) -> None:
    source = f"import ctypes\ndef run(x):\n    ctypes.memset(x.data_ptr() {place}, 9, 1)\n    return x[:2] * 2\n"
    x = torch.ones(64)[offset : offset + 6]
    facts = once(server, source, [x]).facts
    assert facts["guards_broken"] == ([f"{told} input 0"] if told else [])


def test_a_tensor_between_guard_bands_looks_like_any_other(server: ForkServer) -> None:
    facts_of_x = "torch.tensor([float(x.storage_offset()), float(x.untyped_storage().nbytes())])"
    record = once(server, f"import torch\ndef run(x):\n    return {facts_of_x}\n", [torch.ones(5, 3)])
    assert record.outputs[0].tolist() == [0.0, 60.0]


@pytest.mark.parametrize("byte", [ALL_BITS, OTHER_BITS])
def test_what_lies_beyond_the_ends_is_chosen_by_the_caller(server: ForkServer, byte: int) -> None:
    source = (
        "import ctypes, torch\ndef run(x):\n"
        "    ends = (x.data_ptr() - 1, x.data_ptr() + x.nbytes)\n"
        "    return torch.tensor([float(ctypes.c_ubyte.from_address(end).value) for end in ends])\n"
    )
    assert once(server, source, [torch.zeros(7)], guard=byte).outputs[0].tolist() == [byte, byte]


# --- the contract of outputs -----------------------------------------------------------------------

BREACHES = {
    "return torch.ones(2), torch.ones(2)": "2 outputs were returned, 1 are declared",
    "return None": "came as None",
    "return torch.ones(3)": "has shape [3], declared is [2]",
    "return torch.ones(2, 1)": "has shape [2, 1]",
    "return torch.ones(2).double()": "is float64, declared is float32",
    "return torch.ones(2, device='meta')": "lies on meta",
    "return torch.nn.Parameter(torch.ones(2))": "lazy output",
    "return torch.ones(2).to_sparse()": "layout",
    "return 1.0": "came as a float",
    "return {'z': torch.ones(2)}": "keys ['z']",
    "class Lazy(torch.Tensor): pass\n    return torch.ones(2).as_subclass(Lazy)": "a Lazy, a lazy output",
}


@pytest.mark.parametrize("body", BREACHES)
def test_what_is_not_the_declared_output_is_a_breach(server: ForkServer, body: str) -> None:
    record = once(server, f"import torch\ndef run():\n    {body}\n")
    assert record.ran is Ran.RETURNED and not record.usable and not record.outputs
    assert BREACHES[body] in record.breaches[0]


@pytest.mark.parametrize(
    "body", ["torch.ones(2)", "[torch.ones(2)]", "(torch.ones(2),)", "{'y': torch.ones(2)}", "torch.ones(2, 2)[:, 0]"]
)
def test_every_way_to_return_the_declared_output_is_accepted(server: ForkServer, body: str) -> None:
    assert once(server, f"import torch\ndef run(): return {body}\n").outputs[0].tolist() == [1.0, 1.0]


def test_a_destination_that_was_replaced_is_a_breach(server: ForkServer) -> None:
    source = "import torch\ndef run(y): y.set_(torch.ones(2))\n"
    record = once(server, source, dps=True)
    assert not record.usable and "pointing elsewhere" in record.breaches[0]
    assert once(server, source.replace("set_", "copy_"), dps=True).usable


# --- facts -----------------------------------------------------------------------------------------


def test_a_thread_that_lives_on_is_named_and_one_that_ended_is_not(server: ForkServer) -> None:
    source = """
        import threading, time, torch
        def run(seconds):
            worker = threading.Thread(target=time.sleep, args=(seconds,), name='late writer', daemon=True)
            worker.start()
            if seconds < 1: worker.join()
            (torch.ones(512, 512) @ torch.ones(512, 512)).sum()
            return torch.ones(2)
    """
    assert once(server, source, [30.0]).facts["threads_started"] == ["late writer"]
    assert once(server, source, [0.01]).facts["threads_started"] == []


def test_the_pools_of_torch_are_no_threads_of_the_candidate(server: ForkServer) -> None:
    source = """
        import torch
        def run():
            x = torch.ones(700, 700, requires_grad=True)
            (x @ x).sum().backward()
            return torch.ones(2)
    """
    assert once(server, source).facts["threads_started"] == []


PATCHES = [
    ("torch.allclose", "torch.allclose = lambda *a, **k: True"),
    ("torch.cuda.Event.elapsed_time", "torch.cuda.Event.elapsed_time = lambda *a: 0.0"),
    ("time.perf_counter", "time.perf_counter = lambda: 0.0"),
    ("torch.Tensor.__eq__", "torch.Tensor.__eq__ = lambda *a: True"),
    ("builtins.open", "builtins.open = print"),
    ("threading.Thread.start", "threading.Thread.start = print"),
]


@pytest.mark.parametrize(("name", "patch"), PATCHES)
def test_a_replaced_function_is_named_at_import_and_at_call(server: ForkServer, name: str, patch: str) -> None:
    imports = "import builtins, threading, time, torch\n"
    at_import = f"{imports}{patch}\ndef run(): return torch.ones(2)\n"
    at_call = f"{imports}def run():\n    {patch}\n    return torch.ones(2)\n"
    with opened(server, at_import) as session:
        assert session.loaded.facts["patched"] == [name] and session.call([], [TWO]).facts["patched"] == [name]
    with opened(server, at_call) as session:
        assert session.loaded.facts["patched"] == [] and session.call([], [TWO]).facts["patched"] == [name]


def test_importing_dynamo_patches_nothing(server: ForkServer) -> None:
    source = "import torch\nimport importlib\nimportlib.import_module('torch._dyna' + 'mo')\ndef run(): return torch.ones(2)\n"
    with opened(server, source) as session:
        assert session.loaded.ran is Ran.RETURNED and session.loaded.facts["patched"] == []


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_a_compiled_candidate_is_built_in_its_own_cache_and_raises_no_suspicion(server: ForkServer) -> None:
    source = "import torch\n@torch.compile\ndef run(x): return (x * 2).relu()\n"
    with opened(server, source, policy=replace(POLICY, call_timeout_s=120.0, memory_mib=4096)) as session:
        record = session.call([torch.tensor([1.0, -1.0])], [TWO])
        assert record.usable and record.outputs[0].tolist() == [2.0, 0.0], record
        assert not any(record.facts[k] for k in ("threads_started", "patched", "flags_changed", "processes_left"))


def test_changed_flags_and_generators_are_told(server: ForkServer) -> None:
    source = "import os, torch\ndef run():\n    ACT\n    return torch.ones(2, dtype=torch.float32, device='cpu')\n"
    acts = {
        "torch.set_default_dtype(torch.float64)": "default dtype: torch.float32 -> torch.float64",
        "torch.set_default_device('meta')": "default device: cpu -> meta",
        "torch.set_grad_enabled(False)": "grad mode: True -> False",
        "torch.use_deterministic_algorithms(True)": "deterministic algorithms: False -> True",
        "torch.set_float32_matmul_precision('medium')": "float32 matmul precision: highest -> medium",
        "torch.backends.cudnn.benchmark = True": "cudnn benchmark: False -> True",
        "os.environ['NEW'] = '1'": "environment: NEW",
    }
    for act, told in acts.items():
        record = once(server, source.replace("ACT", act))
        assert record.usable and told in record.facts["flags_changed"], (act, record)
    assert once(server, source.replace("ACT", "pass")).facts["flags_changed"] == []
    assert once(server, source.replace("ACT", "torch.rand(1)")).facts["rng_changed"] is True
    del acts["torch.set_default_device('meta')"]  # the call itself fails then
    for act, told in acts.items():  # what the import left behind is told of every call
        assert (
            told in once(server, source.replace("import os, torch", f"import os, torch; {act}")).facts["flags_changed"]
        )


LOWERED = (
    "torch.set_float32_matmul_precision(W)|'high'|'highest'",
    "torch.backends.cuda.matmul.allow_tf32 = W|True|False",
    "torch.backends.cuda.matmul.fp32_precision = W|'tf32'|'ieee'",
    "torch.backends.mkldnn.matmul.fp32_precision = W|'bf16'|'ieee'",
    "torch.backends.fp32_precision = W|'tf32'|'ieee'",
    "torch.backends.cuda.matmul.allow_fp16_accumulation = W|True|False",
)


@pytest.mark.parametrize("write", LOWERED)
def test_a_precision_that_is_lowered_and_put_back_is_told(server: ForkServer, write: str) -> None:
    act, coarse, exact = write.split("|")
    source = "import torch\ndef run():\n    A\n    B\n    return torch.ones(2)\n"
    own, back = act.replace("W", coarse), act.replace("W", exact)
    lowered = once(server, source.replace("A", own, 1).replace("    B", f"    {back}", 1)).facts
    assert lowered["precision_lowered"] and not lowered["flags_changed"], lowered
    raised = once(server, source.replace("A", back, 1).replace("    B", f"    {back}", 1)).facts
    assert not raised["precision_lowered"] and not raised["flags_changed"], raised


# --- the server ------------------------------------------------------------------------------------


def test_a_lost_server_is_started_again() -> None:
    with ForkServer() as own:
        assert once(own, HONEST).usable
        assert own._process is not None
        own._process.kill()
        own._process.wait()
        assert once(own, HONEST).usable


def test_many_sessions_at_once_and_nothing_left_at_the_end() -> None:
    with ForkServer() as own:
        sessions = [opened(own, f"import torch\ndef run(): return torch.tensor([{i}.0, 0])\n") for i in range(5)]
        assert [s.call([], [TWO]).outputs[0][0].item() for s in sessions] == [0, 1, 2, 3, 4]
        root = own._own
        assert root is not None and root.is_dir()
    assert not root.exists() and not any(s.alive for s in sessions)


def test_children_end_when_the_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent("""
        import os, torch
        from seatrial.model import Candidate, SourceFile
        from seatrial.policy import Policy
        from seatrial.workers.process import ForkServer
        source = "import os\\ndef run():\\n    os.execvp('sleep', ['sleep', 'NAP'])\\n"
        server = ForkServer(scratch_root=os.environ['ROOT'])
        server.__enter__()
        session = server.open(Candidate('c', ('python',), 'k.py::run', False, (SourceFile('k.py', source),)), device='cpu', policy=Policy())
        print('up', flush=True)
        session.call([], [])
        """).replace("NAP", NAP)
    )
    environment = {**os.environ, "ROOT": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"up\n"
        _wait_until(lambda: len(_sleepers()) == 1)
        parent.kill()
    _wait_until(lambda: not _sleepers())


def _wait_until(holds: object, seconds: float = 10.0) -> None:
    give_up = time.monotonic() + seconds
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < give_up
        time.sleep(0.02)


# --- a machine that offers less --------------------------------------------------------------------

WITHOUT = {
    "Landlock": "linux.landlock_abi = lambda: 0",
    "namespaces": "linux.unshare = refuse; linux.clone = lambda flags: refuse() if flags else os.fork()",
    "a user to become": "linux.become = refuse",
}


def server_without(*layers: str) -> ForkServer:
    """A fork server on a machine that lacks these layers."""
    refuse = "import os\nfrom seatrial.workers import linux\ndef refuse(*a, **k): raise OSError(1, 'not here')\n"
    bare, start = ForkServer._boot.rsplit("from seatrial.workers.forkserver", 1)
    lacking = "".join(WITHOUT[layer] + "\n" for layer in layers)
    own = ForkServer()
    own._boot = f"{bare}{refuse}{lacking}from seatrial.workers.forkserver{start}"
    return own


@pytest.mark.parametrize("lacking", [("namespaces",), ("namespaces", "Landlock"), tuple(WITHOUT)], ids=" and ".join)
def test_with_fewer_layers_every_ending_is_still_a_record(lacking: tuple[str, ...]) -> None:
    with server_without(*lacking) as weak:
        assert "no PID namespace" in weak.isolation()["processes"]
        assert once(weak, HONEST).usable
        for source, (ran, words) in ENDINGS.items():
            with opened(weak, source) as session:
                record = session.call([], [TWO], timeout_s=0.5)
                assert record.ran is ran and words in record.error, source
        test_descendants_end_with_the_session(weak)
        test_a_fork_bomb_ends_and_a_few_processes_do_not_matter(weak)
        test_eaten_memory_is_out_of_memory_and_a_modest_need_is_served(weak)


def test_each_file_layer_holds_alone(tmp_path: Path) -> None:
    for lacking in (("Landlock", "a user to become"), ("namespaces",)):
        with server_without(*lacking) as weak:
            assert "NOT" not in weak.isolation()["files"]
            vandal = VANDAL if "Landlock" in lacking else VANDAL.replace("lambda: os.utime(folder),", "")
            assert_writes_stay_inside(weak, tmp_path, vandal)
            test_it_can_signal_and_trace_nobody(weak)


def test_an_unconfined_child_is_said_to_be_one() -> None:
    with server_without(*WITHOUT) as weak:
        assert all(weak.isolation()[layer].startswith("NOT") for layer in ("files", "network"))


# --- CUDA ------------------------------------------------------------------------------------------

gpu = pytest.mark.skipif(pick("auto").name == "cpu", reason="needs a CUDA device")
COPY = OutputSlot("y", (1024,), "float32")

TRITON = """
    import torch, triton, triton.language as tl
    @triton.jit
    def double(x, y, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)
    def run(x):
        y = torch.empty_like(x)
        double[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), BLOCK=256)
        return y
"""


def on_gpu(server: ForkServer, source: str, *, dps: bool = False) -> Session:
    return server.open(candidate(source, dps=dps), device="cuda:0", policy=replace(POLICY, memory_mib=8192))


@gpu
@pytest.mark.gpu
def test_a_triton_kernel_runs_confined_and_its_compile_is_paid_once(server: ForkServer) -> None:
    x = torch.rand(1024)
    seconds = []
    for _ in range(2):
        with on_gpu(server, TRITON) as session:
            record = session.call([x], [COPY], timeout_s=60)
            assert record.usable, record
            assert torch.equal(record.outputs[0], x * 2)
            assert record.facts["patched"] == record.facts["threads_started"] == record.facts["flags_changed"] == []
            seconds.append(record.seconds)
    assert seconds[1] < seconds[0]


@gpu
@pytest.mark.gpu
def test_work_left_on_another_stream_shows_as_poison_and_lag(server: ForkServer) -> None:
    source = """
        import torch
        side, big = torch.cuda.Stream(), torch.rand(8192, 8192, device='cuda')
        def run(x):
            y = torch.empty_like(x)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(10): big @ big
                y.copy_(x)
            JOIN
            return y
    """
    for join in ("pass", "torch.cuda.current_stream().wait_stream(side)"):
        with on_gpu(server, source.replace("JOIN", join)) as session:
            session.call([torch.rand(1024)], [COPY])  # the first product loads its library
            record = session.call([torch.rand(1024)], [COPY])
            assert record.usable, record
            assert bool(torch.isnan(record.outputs[0]).any()) == (join == "pass")
            assert (record.facts["stream_lag_s"] > 1e-3) == (join == "pass")


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dps", [True, False])
def test_what_a_cuda_kernel_does_not_write_shows_poison(server: ForkServer, *, dps: bool) -> None:
    source = "def run(x, y): pass\n" if dps else "import torch\ndef run(x): return torch.empty(1024, device='cuda')\n"
    with on_gpu(server, source, dps=dps) as session:
        record = session.call([torch.rand(1024)], [COPY], poison=77.0)
        assert record.usable and bool((record.outputs[0] == 77.0).all()), record


@gpu
@pytest.mark.gpu
def test_a_ruined_context_is_a_crash_and_the_next_child_is_healthy(server: ForkServer) -> None:
    source = TRITON.replace("tl.load(x + at", "tl.load(x + at + 1000000000000")
    with on_gpu(server, source) as session:
        record = session.call([torch.rand(1024)], [COPY], timeout_s=60)
        assert record.ran is Ran.CRASHED and "context is lost" in record.error, record
        assert not session.alive
    with on_gpu(server, TRITON) as session:
        assert session.call([torch.rand(1024)], [COPY], timeout_s=60).usable


@gpu
@pytest.mark.gpu
def test_cuda_memory_exhaustion_is_told_and_survived(server: ForkServer) -> None:
    source = "import torch\ndef run(n): return torch.empty(int(n) << 30, dtype=torch.uint8, device='cuda')[:8].view(torch.float32)\n"
    with on_gpu(server, source) as session:
        assert session.call([1 << 20], [TWO]).ran is Ran.OUT_OF_MEMORY
        assert session.call([1], [TWO]).usable


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_crosses_to_the_gpu_and_back(server: ForkServer, name: str) -> None:
    dtype = dtype_named(name)
    raw = torch.randint(0, 2 if name == "bool" else 256, (8 * dtype.itemsize,), dtype=torch.uint8)
    view = raw.view(dtype).as_strided((2, 3), (1, 2), 1)
    with on_gpu(server, "def run(x):\n    print(x.device, x.stride(), x.storage_offset())\n    return x\n") as session:
        record = session.call([view], [OutputSlot("y", (2, 3), name)], echo=True)
        assert record.usable, record
        assert record.printed == "cuda:0 (1, 2) 1\n" and bits(record.outputs[0]) == bits(view)
