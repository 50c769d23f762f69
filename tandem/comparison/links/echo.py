"""Answers messages to time a link: `python -m tandem.comparison.links.echo HOST`. Uses only the standard library.

A message starts with its own length and the length of the reply, each as 4 bytes, big-endian; padding follows. The
first line on stdout is the port on HOST; the program exits when stdin is closed.
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
    """Builds a message of `size` bytes (at least 8, for the header) that asks for a reply of `reply` bytes."""
    return HEAD.pack(size, reply) + bytes(size - HEAD.size)


def receive(sock: socket.socket, size: int) -> bytes:
    """Receives exactly `size` bytes. Raises ConnectionError if the other side closes first."""
    received = bytearray()
    while len(received) < size:
        data = sock.recv(size - len(received))
        if not data:
            raise ConnectionError(f"closed after {len(received)} of {size} bytes")
        received += data
    return bytes(received)


def answer(sock: socket.socket) -> None:
    """Answers the messages of one connection until it closes."""
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
