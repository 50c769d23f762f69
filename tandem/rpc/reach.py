"""Says why no server answers at an address and what to do, as a socket finds it once a call has failed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass

from tandem.rpc.credentials import Credentials
from tandem.rpc.printable import printable

CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 2.0
"""How long a peer may take to answer; most take milliseconds."""
LOOK_SECONDS = 7.0
_MOST_BYTES = 4096
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""How clients of HTTP/2 begin, with an empty frame of settings."""
_HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
"""An HTTP port of Tandem answers with the gRPC port."""
PASSING = ("UNKNOWN_HOST", "CONNECTION_REFUSED", "UNREACHABLE", "NOT_ANSWERING", "CLOSES_CONNECTIONS")
"""The reasons that may end by themselves, when a server has started."""
_HTTP_BEGINS, _ALERT, _SETTINGS_FRAME = b"HTTP/1.", b"\x15\x03", 4


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why no server answers."""

    reason: str
    message: str


async def obstacle(address: str, credentials: Credentials | None) -> Obstacle | None:
    """Returns why no gRPC server answers at HOST:PORT; None if one seems to."""
    host, _, port = address.rpartition(":")
    given = credentials or Credentials()
    found: Future[Obstacle | None] = Future()
    found.set_running_or_notify_cancel()

    def look() -> None:
        try:
            found.set_result(_look(address, host.strip("[]"), int(port), given))
        except Exception as error:
            found.set_exception(error)

    # asyncio's own threads look up the names of all channels, and those of a pool are waited for when a process ends.
    threading.Thread(target=look, name="reach", daemon=True).start()
    awaited = asyncio.wrap_future(found)
    try:
        await asyncio.wait((awaited,), timeout=LOOK_SECONDS)
        if awaited.done():
            return awaited.result()
    finally:
        awaited.cancel()
    return _unreachable(address, f"it, or the name server, does not answer within {LOOK_SECONDS:g} s")


def _look(address: str, host: str, port: int, credentials: Credentials) -> Obstacle | None:
    try:
        first = _first_bytes(host, port)
        if first is not None and (not first or first.startswith(_ALERT)):
            return _look_by_tls(address, host, port, credentials)
        if first and not _is_http2(first):
            answer = _first_bytes(host, port, asking=_HEALTH)
            if (answer or first).startswith(_HTTP_BEGINS):
                return _http_port(address, host, answer)
    except (socket.gaierror, UnicodeError):  # the latter of a name that cannot be looked up, as a..b
        return Obstacle("UNKNOWN_HOST", f"no machine has the name {host!r}: check its spelling, and this network")
    except ConnectionRefusedError:
        said = f"nothing listens at {address} (connection refused): start the server, or check host and port"
        return Obstacle("CONNECTION_REFUSED", said)
    except OSError as error:
        return _unreachable(address, error.strerror or "no answer to a connection")
    if first is None:
        said = f"{address} takes connections, but nothing answers there: a server that still starts, or hangs"
        return Obstacle("NOT_ANSWERING", said)
    if _is_http2(first) and credentials.ca:
        said = f"the server at {address} speaks clear text, and this client TLS: leave out --tls_ca (in Python: "
        return Obstacle("NO_TLS", said + "Credentials(ca=...)), or start the server with --tls_cert and --tls_key")
    return _other(address, first)


def _look_by_tls(address: str, host: str, port: int, credentials: Credentials) -> Obstacle | None:
    context = ssl.create_default_context(cafile=credentials.ca)
    if credentials.cert:
        context.load_cert_chain(credentials.cert, credentials.key)
    context.set_alpn_protocols(["h2", "http/1.1"])
    if not credentials.ca:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        first = _first_bytes(host, port, context, credentials.server_name or host)
    except ssl.SSLCertVerificationError as error:
        said = f"the certificate of the server at {address} is not accepted: {error.verify_message}"
        return Obstacle("UNTRUSTED", f"{said}; check --tls_ca and --tls_server_name (in Python: Credentials)")
    except ValueError:
        return Obstacle(
            "UNTRUSTED", f"{credentials.server_name or host!r} is no name of a server: check --tls_server_name"
        )
    except OSError as error:  # an ssl.SSLError, or the connection was closed
        if not (isinstance(error, ssl.SSLError) and "ALERT" in str(error.reason)):
            return _other(address, b"")
        first = b""
    if first and first.startswith(_HTTP_BEGINS):
        return _http_port(address, host, _first_bytes(host, port, context, credentials.server_name or host, _HEALTH))
    if not credentials.ca:
        said = f"the server at {address} speaks TLS, and this client clear text: give the CA that signed its "
        return Obstacle("NEEDS_TLS", said + "certificate with --tls_ca FILE (in Python: Credentials(ca=FILE))")
    if first == b"":
        said = f"the server at {address} ends connections without a certificate of the client that it accepts: check "
        return Obstacle("NEEDS_CERTIFICATE", said + "--tls_client_cert, --tls_client_key (in Python: Credentials)")
    return None if first is None else _other(address, first)


def _other(address: str, first: bytes) -> Obstacle | None:
    """Returns what is wrong with a port by what it says first; None if that is HTTP/2."""
    if _is_http2(first):
        return None
    if not first:
        said = f"what listens at {address} closes connections at once: no gRPC server, or one that is not ready"
        return Obstacle("CLOSES_CONNECTIONS", said)
    return Obstacle("OTHER_PROTOCOL", f"what listens at {address} does not speak gRPC: check the port")


def _http_port(address: str, host: str, answer: bytes | None) -> Obstacle:
    number = _grpc_port(answer or b"")
    shown = f"[{host}]" if ":" in host else host
    where = f"gRPC is at {shown}:{number}" if number else "give the port of gRPC (--port; 50051 unless told otherwise)"
    return Obstacle("HTTP_PORT", f"{address} is an HTTP port; {where}")


def _grpc_port(answer: bytes) -> int | None:
    """Returns the gRPC port that an HTTP port of Tandem tells."""
    with contextlib.suppress(ValueError, AttributeError, RecursionError):
        found = json.loads(answer.partition(b"\r\n\r\n")[2]).get("grpc_port")
        return found if type(found) is int and 0 < found < 65536 else None
    return None


def _first_bytes(
    host: str, port: int, context: ssl.SSLContext | None = None, name: str = "", asking: bytes = _PREFACE
) -> bytes | None:
    """Returns what a server answers first: b"" if it closes, None if it says nothing. Raises OSError."""
    found, ends = b"", time.monotonic() + ANSWER_SECONDS
    with socket.create_connection((host, port), CONNECT_SECONDS) as plain:
        plain.settimeout(ANSWER_SECONDS)
        with context.wrap_socket(plain, server_hostname=name) if context else contextlib.nullcontext(plain) as own:
            try:
                own.sendall(asking)
                while not _enough(found) and (left := ends - time.monotonic()) > 0:
                    own.settimeout(left)
                    if not (more := own.recv(_MOST_BYTES)):
                        break
                    found += more
            except TimeoutError:
                return found or None
            except ConnectionError:
                return found
    return found


def _enough(first: bytes) -> bool:
    """Whether it is known who answers. Of an answer of HTTP/1, the rest is read too."""
    return len(first) >= _MOST_BYTES or (len(first) >= 9 and not first.startswith(_HTTP_BEGINS))


def _is_http2(first: bytes) -> bool:
    """Whether it begins with a frame of settings, as every server of HTTP/2 does."""
    return len(first) >= 9 and first[3] == _SETTINGS_FRAME and first[5:9] == bytes(4)


def _unreachable(address: str, why: str) -> Obstacle:
    return Obstacle("UNREACHABLE", f"{address} cannot be reached: {printable(why)}")
