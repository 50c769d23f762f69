"""Answers messages, to time a link with: `python -m tandem.comparison.links.echo HOST`. Standard library alone.

A message is its own length in bytes and that of the wanted reply, each in 4 bytes, big-endian, then filling up to that
length. The first line on stdout is the port on HOST; the program ends when stdin does.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading

HEAD = struct.Struct(">II")


def message(size: int, reply: int) -> bytes:
    """`size` bytes, at least the 8 of the head, that are answered by `reply` bytes."""
    return HEAD.pack(size, reply) + bytes(size - HEAD.size)


def receive(sock: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes. Raises ConnectionError where the other side has closed before."""
    received = bytearray()
    while len(received) < size:
        data = sock.recv(size - len(received))
        if not data:
            raise ConnectionError(f"closed after {len(received)} of {size} bytes")
        received += data
    return bytes(received)


def answer(sock: socket.socket) -> None:
    """All messages of a connection, until it closes."""
    with sock, contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            size, reply = HEAD.unpack(receive(sock, HEAD.size))
            receive(sock, size - HEAD.size)
            sock.sendall(bytes(reply))


def _accept(listener: socket.socket) -> None:
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=answer, args=(sock,), daemon=True).start()


if __name__ == "__main__":
    server = socket.create_server((sys.argv[1], 0))
    threading.Thread(target=_accept, args=(server,), daemon=True).start()
    print(server.getsockname()[1], flush=True)
    while os.read(sys.stdin.fileno(), 4096):
        pass
