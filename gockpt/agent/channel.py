"""Channels between a trainer and its agent: a unix socket, or two queues inside one process.

Each end has one reading thread; sending is serialised by a lock. ``receive`` always has a time-out.
A channel whose other side has gone raises :class:`ChannelClosed`; whether the *process* at the
other side lives is judged by its pidfd, never by the socket: a forked child of the trainer may keep
the socket open long after the trainer was killed.
"""

from __future__ import annotations

import array
import contextlib
import os
import queue
import select
import socket
import struct
import threading
from typing import Protocol

import msgspec

from gockpt.agent.protocol import AnyMessage
from gockpt.arena import Segment

_LENGTH = struct.Struct("<I")
_NO_WAIT = getattr(socket, "MSG_DONTWAIT", 0)
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(AnyMessage)


class ChannelClosed(Exception):
    """The other side has gone."""


class Channel(Protocol):
    """One end of a connection. Its two implementations pass one conformance suite."""

    def send(self, message: AnyMessage, segment: Segment | None = None) -> None:
        """Send a message, with memory beside it if given."""
        ...

    def receive(self, timeout: float) -> tuple[AnyMessage, Segment | None] | None:
        """The next message, or None if none came within ``timeout`` seconds."""
        ...

    def peer_ended(self, timeout: float) -> bool:
        """Whether the process at the other side is known to end within ``timeout`` seconds."""
        ...

    def close(self) -> None:
        """Close this end."""
        ...


class SocketChannel:
    """Length-prefixed messages over a stream socket, descriptors as ancillary data."""

    def __init__(self, sock: socket.socket, *, peer_pidfd: int | None = None) -> None:
        self._socket = sock
        self._peer = peer_pidfd
        self._sending = threading.Lock()
        self._buffer = bytearray()
        self._fds: list[int] = []

    def send(self, message: AnyMessage, segment: Segment | None = None) -> None:
        body = _ENCODER.encode(message)
        data = memoryview(_LENGTH.pack(len(body)) + body)
        beside: list[tuple[int, int, array.array[int]]] = []
        if segment is not None:
            fds = array.array("i", [segment.fd if segment.fd is not None else -1])
            beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
        try:
            with self._sending:
                while data:
                    self._await_room()
                    with contextlib.suppress(BlockingIOError):
                        data = data[self._socket.sendmsg([data], beside, _NO_WAIT) :]
                        beside = []
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def _await_room(self) -> None:
        """Wait until something can be sent, as long as the other process lives."""
        if self._socket.fileno() < 0:
            raise ChannelClosed("the connection was closed")
        poller = select.poll()
        poller.register(self._socket, select.POLLOUT)
        if self._peer is not None:
            poller.register(self._peer, select.POLLIN)
        if self._socket.fileno() not in dict(poller.poll()):
            raise ChannelClosed("the other process has ended")

    def receive(self, timeout: float) -> tuple[AnyMessage, Segment | None] | None:
        while (message := self._next()) is None:
            if not self._fill(timeout):
                return None
        name = getattr(message, "size", None)
        segment = Segment(name, fd=self._fds.pop(0)) if name is not None and self._fds else None
        return message, segment

    def _next(self) -> AnyMessage | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        try:
            message: AnyMessage = _DECODER.decode(body)
        except msgspec.MsgspecError as error:
            raise ChannelClosed(f"the other side speaks another protocol ({error})") from error
        return message

    def _fill(self, timeout: float) -> bool:
        if self._socket.fileno() < 0:
            raise ChannelClosed("the connection was closed")
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        if self._peer is not None:
            poller.register(self._peer, select.POLLIN)
        ready = dict(poller.poll(max(0, timeout) * 1000))
        if self._socket.fileno() in ready:
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, 1 << 20, 8, _CLOEXEC)
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            self._fds += fds
            self._buffer += data
            if not data:
                raise ChannelClosed("the connection was closed")
            return True
        if ready:
            raise ChannelClosed("the other process has ended")
        return False

    def peer_ended(self, timeout: float) -> bool:
        if self._peer is None:
            return False
        return bool(select.select([self._peer], [], [], max(0.0, timeout))[0])

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # whoever is sending gives up…
        with self._sending:  # …before its descriptors are those of something else
            self._socket.close()
            if self._peer is not None:
                os.close(self._peer)
                self._peer = None


class QueueChannel:
    """Two queues: the agent as a thread of the trainer. Memory is passed by reference.

    ``queue.SimpleQueue`` would not do: its ``get(timeout=...)`` waits for ever when the time has
    run out before it looks (CPython 3.11 makes a negative rest of it).
    """

    def __init__(self, incoming: queue.Queue[_Item], outgoing: queue.Queue[_Item]) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._closed = False

    @classmethod
    def pair(cls) -> tuple[QueueChannel, QueueChannel]:
        """Two connected ends."""
        one: queue.Queue[_Item] = queue.Queue()
        two: queue.Queue[_Item] = queue.Queue()
        return cls(one, two), cls(two, one)

    def send(self, message: AnyMessage, segment: Segment | None = None) -> None:
        if self._closed:
            raise ChannelClosed("the connection was closed")
        # Encoded all the same: both kinds of agent get copies, never the trainer's live objects.
        self._outgoing.put((_ENCODER.encode(message), segment))

    def receive(self, timeout: float) -> tuple[AnyMessage, Segment | None] | None:
        if self._closed:
            raise ChannelClosed("the connection was closed")
        try:
            item = self._incoming.get(timeout=max(timeout, 0.0))
        except queue.Empty:
            return None
        if item is None:
            self._incoming.put(None)
            raise ChannelClosed("the connection was closed")
        return _DECODER.decode(item[0]), item[1]

    def peer_ended(self, timeout: float) -> bool:
        return False  # both ends are in one process

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._outgoing.put(None)


_Item = tuple[bytes, Segment | None] | None


def pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None where there is none."""
    opener = getattr(os, "pidfd_open", None)
    return None if opener is None else opener(pid)
