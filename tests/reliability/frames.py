"""Bytes on a bare connection: noise, HTTP/2 that is nearly right, requests that are cut off or taken back."""

from __future__ import annotations

import random
import socket
import struct

from tests.support import HANG

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST, SETTINGS, PING, GOAWAY, WINDOW, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, END_HEADERS, ACK = 1, 4, 1
NO_WINDOW = struct.pack(">HI", 4, 0)  # SETTINGS_INITIAL_WINDOW_SIZE: streams may carry nothing to us


def frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    """One HTTP/2 frame; with a `length` of its own, one that lies about it."""
    size = len(payload) if length is None else length
    return struct.pack(">I", size)[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _literal(name: str, value: str) -> bytes:
    """A header field without compression (RFC 7541, 6.2.2). Surrogates stand for bytes that are no UTF-8."""
    data = value.encode(errors="surrogateescape")
    return b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(data)]) + data


def headers(path: str) -> bytes:
    return b"".join(
        _literal(name, value)
        for name, value in (
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", "fuzz"),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
        )
    )


def message(payload: bytes, length: int | None = None) -> bytes:
    """gRPC's length-prefixed message; with a `length` of its own, one that lies about it."""
    return b"\x00" + struct.pack(">I", len(payload) if length is None else length) + payload


def conversation(chance: random.Random, path: str, request: bytes) -> bytes:
    """What one connection sends before it is closed."""
    opening = PREFACE + frame(SETTINGS, 0, 0, b"")
    head = frame(HEADERS, END_HEADERS, 1, headers(path))
    noise = chance.randbytes(chance.randrange(1, 200))
    return chance.choice(
        [
            noise,
            PREFACE[: chance.randrange(len(PREFACE))],
            PREFACE + noise,
            opening + noise,
            opening + head,  # and never a message
            opening + head + frame(DATA, 0, 1, message(request)[: chance.randrange(5 + len(request))]),
            opening + head + frame(DATA, END_STREAM, 1, message(request, chance.randrange(2**32))),
            opening + head + frame(DATA, END_STREAM, 1, message(request), chance.randrange(2**24)),
            opening + head + frame(DATA, END_STREAM, 1, message(noise)),
            opening + head + frame(DATA, 0, 1, message(request)) + frame(RST, 0, 1, struct.pack(">I", 8)),
            opening + b"".join(_taken_back(path, request, 2 * i + 1) for i in range(30)),
            opening + frame(chance.randrange(256), chance.randrange(256), chance.randrange(2**31), noise),
            opening + frame(HEADERS, 0, 1, headers(path)) + frame(CONTINUATION, 0, 1, noise),
            opening + frame(WINDOW, 0, 0, struct.pack(">I", 2**31 - 1)) * 3,
            opening + frame(PING, 0, 0, bytes(8)) * 50,
            opening + frame(GOAWAY, 0, 0, bytes(8)) + head,
        ]
    )


def _taken_back(path: str, request: bytes, stream: int) -> bytes:
    """A request and its cancellation, in one breath."""
    head = frame(HEADERS, END_HEADERS, stream, headers(path))
    return head + frame(DATA, END_STREAM, stream, message(request)) + frame(RST, 0, stream, struct.pack(">I", 8))


def unread(address: str, path: str, request: bytes, ends: bool = True) -> socket.socket:
    """A call whose replies are never read: its window is 0. Returns once the server has begun to answer.

    `ends`: whether the request is the last of its stream.
    """
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    connection.sendall(PREFACE + frame(SETTINGS, 0, 0, NO_WINDOW) + frame(SETTINGS, ACK, 0, b""))
    connection.sendall(frame(HEADERS, END_HEADERS, 1, headers(path)))
    connection.sendall(frame(DATA, END_STREAM if ends else 0, 1, message(request)))
    with connection.makefile("rb") as replies:
        while True:
            head = replies.read(9)
            assert len(head) == 9, "the server closed the connection"
            replies.read(int.from_bytes(head[:3], "big"))
            if head[3] == HEADERS:
                return connection


def send(address: str, data: bytes) -> None:
    """Connects, sends, reads a little if there is anything, and is gone."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=HANG) as connection:
        connection.settimeout(0.005)
        try:
            connection.sendall(data)
            connection.recv(256)
        except (TimeoutError, ConnectionError):
            pass
