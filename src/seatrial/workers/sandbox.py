"""The layers that confine a child. Each is used where the machine offers it, and reported in words.

A machine is asked once, when the fork server starts, by trying every layer in a throw-away process. A layer
that worked then and fails later stops the child: a candidate never runs with less than was reported.
"""

from __future__ import annotations

import os
import resource
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from seatrial.workers import linux

_MIB = 1 << 20
_LARGEST_FILE = 256 * _MIB
_ENVIRONMENT = ("PATH", "LANG", "LD_LIBRARY_PATH")  # and CUDA_*: all that a child inherits
_DEVICE_FILES = ("null", "zero", "full", "random", "urandom", "nvidia*", "nvidia-caps/*")
_MACHINE_IN_PROC = (
    "/proc/sys",
    "/proc/sysrq-trigger",
    "/proc/irq",
    "/proc/bus",
    "/proc/fs",
    "/proc/acpi",
    "/proc/scsi",
)
_CORES = os.cpu_count() or 1
TASK_LIMIT = 1024 + 8 * _CORES  # threads and processes of one candidate's user
PROCESS_LIMIT = 128 + 8 * _CORES  # processes below one child: a parallel build fits, a fork bomb does not


@dataclass(frozen=True)
class Place:
    """What one child is given: where it may write, who it is, how much memory it may add.

    `data_limit` asks the kernel to refuse memory beyond `memory_mib`; on CUDA the address space is far too
    large for that and the keeper watches the resident memory instead.
    """

    scratch: Path
    cache: Path
    uid: int
    memory_mib: int
    data_limit: bool
    reads_private: bool = False  # the candidate's own imports may lie where only the caller can read


@dataclass(frozen=True)
class Layers:
    """What this machine lets us use. `landlock` is the kernel's ABI number, 0 for none."""

    user_namespace: bool = False
    network: bool = False
    read_only: bool = False
    processes: bool = False
    landlock: int = 0
    own_uid: bool = False
    may_read_all: bool = False
    must_read_all: bool = False

    @property
    def clone_flags(self) -> int:
        """Namespaces that every child gets afresh."""
        own_mounts = linux.CLONE_NEWNS if self.read_only or self.processes else 0
        return own_mounts | (linux.CLONE_NEWPID if self.processes else 0)

    @property
    def counts_tasks(self) -> bool:
        """RLIMIT_NPROC counts per user: usable only where nobody else shares the count."""
        return self.own_uid or (self.user_namespace and _kernel_version() >= (5, 14))


# --- the fork server, once -------------------------------------------------------------------------


def enter_namespaces(uid: int, must_read: Sequence[Path]) -> Layers:
    """Moves the calling process (single-threaded, before torch) into namespaces and tells what children can use.

    `uid` is the first of the ordinary users that children become when this process is root; `must_read`
    are files that such a user has to reach.
    """
    is_root = os.geteuid() == 0
    user_namespace = not is_root and _works(_enter_user_namespace_with_mounts)
    if user_namespace:
        _enter_user_namespace()
    has_mounts = _done(lambda: linux.unshare(linux.CLONE_NEWNS)) and _done(linux.make_mounts_private)
    network = _done(lambda: linux.unshare(linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS))
    with tempfile.TemporaryDirectory(prefix="seatrial-probe-") as name:
        read_only = has_mounts and _works(lambda: _prove_read_only(Path(name)), flags=linux.CLONE_NEWNS)
    # a PID namespace without its own /proc would be no use: CUDA looks its threads up there
    processes = has_mounts and _works(linux.mount_proc, flags=linux.CLONE_NEWPID | linux.CLONE_NEWNS)
    may_read_all = is_root and _works(lambda: _become(uid, keep_reading=True))
    can_read = is_root and _works(lambda: _prove_readable(uid, must_read))
    return Layers(
        user_namespace=user_namespace,
        network=network,
        read_only=read_only,
        processes=processes,
        landlock=linux.landlock_abi() if _works(lambda: _landlock_for((Path("/"),))) else 0,
        own_uid=can_read or may_read_all,
        may_read_all=may_read_all,
        must_read_all=not can_read,
    )


def _done(step: Callable[[], object]) -> bool:
    try:
        step()
    except OSError:
        return False
    return True


def _works(step: Callable[[], object], *, flags: int = 0) -> bool:
    """Whether `step` succeeds in a throw-away process made with these namespaces."""
    try:
        pid = linux.clone(flags)
    except OSError:
        return False
    if pid == 0:
        os._exit(0 if _done(step) else 1)
    return os.waitpid(pid, 0)[1] == 0


def _enter_user_namespace() -> None:
    uid, gid = os.geteuid(), os.getegid()
    linux.unshare(linux.CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def _enter_user_namespace_with_mounts() -> None:
    _enter_user_namespace()
    linux.unshare(linux.CLONE_NEWNS)
    linux.make_mounts_private()


def _prove_read_only(folder: Path) -> None:
    inside, outside = folder / "inside", folder / "outside"
    inside.mkdir()
    _view_with_writable((inside,))
    (inside / "file").write_text("")
    if _done(lambda: outside.write_text("")):
        raise OSError("the read-only view can be written to")


def _become(uid: int, *, keep_reading: bool) -> None:
    linux.empty_bounding_set(keep_reading=keep_reading)
    linux.become(uid, keep_reading=keep_reading)
    linux.set_dumpable(dumpable=True)  # a change of user had made it look like a privileged program


def _prove_readable(uid: int, paths: Sequence[Path]) -> None:
    _become(uid, keep_reading=False)
    for path in paths:
        if not os.access(path, os.R_OK):
            raise OSError(f"{path} cannot be read by another user")


def _kernel_version() -> tuple[int, ...]:
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in os.uname().release.split(".")[:2])


# --- one child -------------------------------------------------------------------------------------


def enter_view(layers: Layers, place: Place) -> None:
    """In the keeper, in fresh namespaces: the mounts that its child will see."""
    if layers.processes:
        linux.mount_proc()
    if layers.read_only:
        _view_with_writable((place.scratch, place.cache))


def _view_with_writable(folders: Sequence[Path]) -> None:
    """CUDA names its threads through /proc, so that stays writable, except where it is about the machine."""
    machine = [path for path in map(Path, _MACHINE_IN_PROC) if path.exists()]
    for path in (*folders, *machine):
        linux.bind_onto_itself(path)
    linux.make_read_only(Path("/"))
    for folder in (*folders, Path("/proc")):
        linux.make_writable(folder)


def confine(layers: Layers, place: Place) -> None:
    """In the process that will hold the candidate: gives up everything that it does not need, for good."""
    _limit_resources(layers, place)
    if layers.own_uid:
        _become(place.uid, keep_reading=layers.must_read_all or (place.reads_private and layers.may_read_all))
    else:
        linux.empty_bounding_set(keep_reading=False)
        linux.set_capabilities(0)
    linux.die_with_parent()
    linux.forbid_new_privileges()
    if layers.landlock:
        _landlock_for((place.scratch, place.cache))
    _furnish(place)


def _landlock_for(folders: Sequence[Path]) -> None:
    if linux.landlock_abi() == 0:
        raise OSError("the kernel offers no Landlock")
    linux.forbid_new_privileges()
    linux.landlock(folders, (*_device_files(), Path("/proc/self/task")))


def _device_files() -> Iterator[Path]:
    for pattern in _DEVICE_FILES:
        for path in Path("/dev").glob(pattern):
            if stat.S_ISCHR(path.stat().st_mode):
                yield path


def _limit_resources(layers: Layers, place: Place) -> None:
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_FSIZE, _LARGEST_FILE)
    if layers.counts_tasks:
        _lower(resource.RLIMIT_NPROC, TASK_LIMIT)
    if place.data_limit and (used := memory_of("self").get("VmData")):
        _lower(resource.RLIMIT_DATA, used + place.memory_mib * _MIB)


def _lower(kind: int, limit: int) -> None:
    _, hard = resource.getrlimit(kind)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (limit, limit))


def memory_of(pid: int | str) -> dict[str, int]:
    """The Vm* and Rss* lines of /proc/<pid>/status in bytes; empty when the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    sizes = (line.split() for line in lines if line.startswith(("Vm", "Rss")) and line.endswith("kB"))
    return {name.rstrip(":"): int(size) * 1024 for name, size, _ in sizes}


def inherited_environment() -> dict[str, str]:
    """What of this process's environment a child may see."""
    return {k: v for k, v in os.environ.items() if k in _ENVIRONMENT or k.startswith("CUDA_")}


def _furnish(place: Place) -> None:
    """Own folders, and an environment that points every tool at them."""
    home, temporary = place.scratch / "home", place.scratch / "tmp"
    for folder in (home, temporary, place.scratch / "src"):
        folder.mkdir(exist_ok=True)
    settings = inherited_environment() | {
        "HOME": str(home),
        "USER": "candidate",  # getpass asks here before the user database, which does not know us
        "LOGNAME": "candidate",
        "TMPDIR": str(temporary),
        "XDG_CACHE_HOME": str(place.cache),
        "XDG_CONFIG_HOME": str(home),
        "XDG_DATA_HOME": str(home),
        "XDG_STATE_HOME": str(home),
        "XDG_RUNTIME_DIR": str(temporary),
        "TRITON_CACHE_DIR": str(place.cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(place.cache / "inductor"),
        "TORCH_EXTENSIONS_DIR": str(place.cache / "extensions"),
        "CUDA_CACHE_PATH": str(place.cache / "cuda"),
        "CUDA_MODULE_LOADING": "LAZY",  # torch sets it at first use otherwise: a change that is not the candidate's
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no pool of compile processes that outlives a call
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    os.environ.clear()
    os.environ.update(settings)
    tempfile.tempdir = None
    os.chdir(temporary)


# --- in words --------------------------------------------------------------------------------------


def describe(layers: Layers) -> dict[str, str]:
    """What confines a child on this machine, for a person."""
    alone = "" if layers.read_only else ", which does not cover modes and times of files"
    writes = [f"Landlock (ABI {layers.landlock}){alone}"] if layers.landlock else []
    writes += ["a read-only view of every mount"] if layers.read_only else []
    walls = ["own network namespace, without interfaces"] if layers.network else []
    walls += ["no TCP by Landlock"] if layers.landlock >= 4 else []
    return {
        "files": f"writes only to its own scratch and cache folder, by {' and '.join(writes)}"
        if writes
        else "NOT confined to its scratch folder: no Landlock and no mount namespace here",
        "processes": _describe_processes(layers),
        "network": "; ".join(walls) or "NOT cut off: no network namespace and no Landlock ABI 4 here",
        "user": _describe_user(layers),
        "environment": f"only {', '.join(_ENVIRONMENT)} and CUDA_* are inherited",
        "memory": "kernel limit on data (CPU), watched resident memory of the whole process tree (CPU and CUDA)",
        "limits": f"{PROCESS_LIMIT} processes, files of {_LARGEST_FILE // _MIB} MiB, no core dumps"
        + (f", {TASK_LIMIT} tasks" if layers.counts_tasks else ""),
    }


def _describe_processes(layers: Layers) -> str:
    if layers.processes:
        return "own PID namespace with its own /proc"
    return "own session; descendants are adopted and ended one by one (no PID namespace here)"


def _describe_user(layers: Layers) -> str:
    if layers.own_uid:
        kept = "the one to read files (the interpreter is not readable otherwise)" if layers.must_read_all else "none"
        return f"an unprivileged user of its own; capabilities: {kept}; no new privileges"
    if layers.user_namespace:
        return "the caller's user in a user namespace, without capabilities; no new privileges"
    return "the caller's user, without capabilities; no new privileges"
