"""The Linux calls behind the sandbox that Python does not offer.

Every function raises OSError with the kernel's errno. Nothing here decides anything: sandbox.py does.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterable
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 0x1000, 0x4000, 1 << 18
_MOUNT_ATTR_RDONLY, _AT_FDCWD, _AT_RECURSIVE = 1, -100, 0x8000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_CAPBSET_DROP = 1, 4, 8, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 36, 38, 47, 2
_SIGCHLD, _SIGKILL = 17, 9
_CAP_DAC_READ_SEARCH, _LAST_CAP = 2, 40

# x86_64 and aarch64 are what GPU machines are; newer calls have one number everywhere
_CLONE, _CAPSET = {"x86_64": (56, 126), "aarch64": (220, 91)}.get(platform.machine(), (0, 0))
_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 442, 444, 445, 446

# PyDLL keeps the interpreter lock held during the call: the process that clone() makes must own it.
_libc = ctypes.PyDLL(None, use_errno=True)


def _check(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _syscall(number: int, *arguments: object) -> int:
    if number == 0:
        raise OSError(38, f"system call number not known on {platform.machine()}")
    return _check(_libc.syscall(ctypes.c_long(number), *arguments))


def _prctl(option: int, *arguments: int) -> None:
    padded = [ctypes.c_ulong(a) for a in (*arguments, 0, 0, 0, 0)[:4]]
    _check(_libc.prctl(option, *padded))


# --- processes -------------------------------------------------------------------------------------


def clone(flags: int) -> int:
    """fork() into new namespaces; 0 in the child. Call it from a single-threaded process only."""
    if flags == 0:
        return os.fork()
    zero = ctypes.c_ulong(0)
    return _syscall(_CLONE, ctypes.c_ulong(flags | _SIGCHLD), zero, zero, zero, zero)


def unshare(flags: int) -> None:
    _check(_libc.unshare(ctypes.c_int(flags)))


def die_with_parent() -> None:
    """SIGKILL for this process when the one that forked it ends. Undone by a change of user."""
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL)


def adopt_orphans() -> None:
    """Descendants that lose their parent become children of this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_dumpable(*, dumpable: bool) -> None:
    """A process that is not dumpable cannot be traced or read through /proc by its own user."""
    _prctl(_PR_SET_DUMPABLE, int(dumpable))


# --- privileges ------------------------------------------------------------------------------------


def forbid_new_privileges() -> None:
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def empty_bounding_set(*, keep_reading: bool) -> None:
    """No program started from here can gain a capability. Without the right to do so there is none to lose.

    What is to be kept must stay in the set, or the kernel refuses to make it inheritable.
    """
    for capability in range(_LAST_CAP + 1):
        if keep_reading and capability == _CAP_DAC_READ_SEARCH:
            continue
        try:
            _prctl(_PR_CAPBSET_DROP, capability)
        except OSError:
            return


def become(uid: int, *, keep_reading: bool) -> None:
    """Becomes an ordinary user for good; `keep_reading` keeps the one capability to read any file."""
    if keep_reading:
        _prctl(_PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    set_capabilities(1 << _CAP_DAC_READ_SEARCH if keep_reading else 0)
    if keep_reading:
        _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _CAP_DAC_READ_SEARCH)


def set_capabilities(mask: int) -> None:
    """Permitted, effective and inheritable capabilities become exactly `mask` (its low 32 bits)."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)(mask, mask, mask, 0, 0, 0)
    _syscall(_CAPSET, header, data)


# --- mounts ----------------------------------------------------------------------------------------


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    _check(_libc.mount(source.encode(), target.encode(), kind.encode() if kind else None, ctypes.c_ulong(flags), None))


def make_mounts_private() -> None:
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)


def mount_proc() -> None:
    """A /proc that shows this PID namespace only."""
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)


def bind_onto_itself(folder: Path) -> None:
    _mount(str(folder), str(folder), None, _MS_BIND | _MS_REC)


def _mount_setattr(path: Path, *, flags: int, to_set: int, to_clear: int) -> None:
    attributes = (ctypes.c_uint64 * 4)(to_set, to_clear, 0, 0)
    _syscall(
        _MOUNT_SETATTR,
        ctypes.c_int(_AT_FDCWD),
        str(path).encode(),
        ctypes.c_uint(flags),
        attributes,
        ctypes.c_size_t(32),
    )


def make_read_only(path: Path) -> None:
    """Every mount at and below `path`."""
    _mount_setattr(path, flags=_AT_RECURSIVE, to_set=_MOUNT_ATTR_RDONLY, to_clear=0)


def make_writable(path: Path) -> None:
    _mount_setattr(path, flags=0, to_set=0, to_clear=_MOUNT_ATTR_RDONLY)


# --- Landlock --------------------------------------------------------------------------------------

_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
_CHANGE_FOLDERS = 0b1_1111_1111 << 4  # remove and make files, folders, links, sockets, nodes
_REFER = 1 << 13
_NET_BIND_CONNECT, _SCOPE_SOCKET_SIGNAL = 0b11, 0b11


def landlock_abi() -> int:
    """0 where the kernel offers no Landlock."""
    try:
        return _syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    except OSError:
        return 0


def landlock(own_folders: Iterable[Path], writable: Iterable[Path]) -> None:
    """Everything is allowed below `own_folders`, writing to what exists in `writable`; elsewhere only reading.

    Also no TCP (ABI 4) and no signals or abstract sockets out of this process tree (ABI 6). Cannot be undone.
    """
    abi = landlock_abi()
    file_rights = _WRITE_FILE | (_TRUNCATE if abi >= 3 else 0)
    rights = file_rights | _CHANGE_FOLDERS | (_REFER if abi >= 2 else 0)
    attributes = [rights, _NET_BIND_CONNECT, _SCOPE_SOCKET_SIGNAL][: 3 if abi >= 6 else 2 if abi >= 4 else 1]
    ruleset = (ctypes.c_uint64 * len(attributes))(*attributes)
    fd = _syscall(_LANDLOCK_CREATE, ruleset, ctypes.c_size_t(ctypes.sizeof(ruleset)), ctypes.c_uint32(0))
    try:
        for folder in own_folders:
            _allow(fd, folder, rights)
        for path in writable:
            _allow(fd, path, file_rights)
        _syscall(_LANDLOCK_RESTRICT, ctypes.c_int(fd), ctypes.c_uint32(0))
    finally:
        os.close(fd)


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def _allow(ruleset: int, path: Path, rights: int) -> None:
    target = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = _PathRule(rights, target)
        _syscall(_LANDLOCK_ADD, ctypes.c_int(ruleset), ctypes.c_int(1), ctypes.byref(rule), ctypes.c_uint32(0))
    finally:
        os.close(target)
