"""Length-checked messages between the parent and a process that it does not trust.

A message is a fixed head (magic, a random token, the header's length), a JSON header and raw bytes whose
number the receiver knows beforehand. A reply repeats the token of its request, so bytes that candidate
code writes on the socket are recognised as garbage. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import secrets
import socket
import struct
import time
from collections.abc import Iterable
from typing import Any, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview

REPLY_LIMIT = 1 << 18  # bytes of JSON accepted from a child
REQUEST_LIMIT = 1 << 28  # bytes of JSON a child accepts from the parent: sources travel in it

_MAGIC = b"strl"
_HEAD = struct.Struct("!4s16sI")
_SOCKET_BUFFER = 1 << 22  # fewer switches between the two processes on large tensors


class Gone(Exception):
    """The other side closed the socket."""


class Late(Exception):
    """The deadline passed."""


class Garbled(Exception):
    """What arrived is not a message of ours."""


class Wire:
    """One side of a stream socket. `deadline` is a `time.monotonic()` moment, None for no limit."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.deadline: float | None = None

    @staticmethod
    def pair() -> tuple[Wire, socket.socket]:
        """A connected pair: the near side ready for use, the far side to be given away."""
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        for side in (near, far):
            side.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
        return Wire(near), far

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()

    def send(self, header: dict[str, Any], blobs: Iterable[Buffer] = (), *, token: bytes | None = None) -> bytes:
        """Sends one message and returns its token. Raises Gone or Late."""
        token = token or secrets.token_bytes(16)
        text = json.dumps(header).encode()
        self._push(_HEAD.pack(_MAGIC, token, len(text)) + text)
        for blob in blobs:
            self._push(blob)
        return token

    def receive(self, *, limit: int, token: bytes | None = None) -> tuple[dict[str, Any], bytes]:
        """The next header and its token; with `token`, only a reply to that request will do.

        Raises Gone, Late, or Garbled when the head, the token, the length or the JSON is not ours.
        """
        head = bytearray(_HEAD.size)
        self.fill(head)
        magic, got, length = _HEAD.unpack(head)
        if magic != _MAGIC or (token is not None and got != token):
            raise Garbled("bytes that are no reply")
        if length > limit:
            raise Garbled(f"a header of {length} bytes where {limit} are allowed")
        text = bytearray(length)
        self.fill(text)
        try:
            header = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Garbled("a header that is not JSON") from error
        if not isinstance(header, dict):
            raise Garbled("a header that is not a JSON object")
        return header, got

    def fill(self, buffer: bytearray | memoryview) -> None:
        """Reads exactly as many bytes as `buffer` holds. Raises Gone or Late."""
        rest = memoryview(buffer)
        while rest.nbytes:
            self._arm()
            try:
                count = self._sock.recv_into(rest)
            except TimeoutError as error:
                raise Late from error
            except OSError as error:
                raise Gone from error
            if count == 0:
                raise Gone
            rest = rest[count:]

    def _push(self, blob: Buffer) -> None:
        self._arm()
        try:
            self._sock.sendall(blob)
        except TimeoutError as error:
            raise Late from error
        except OSError as error:
            raise Gone from error

    def _arm(self) -> None:
        if self.deadline is None:
            self._sock.settimeout(None)
            return
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise Late
        self._sock.settimeout(left)
