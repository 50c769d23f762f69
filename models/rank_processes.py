"""The other processes that share a target, started, watched and ended by rank 0 where torchrun does not."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence

from models.engine import Engine
from models.tensor_parallel import Ranks

log = logging.getLogger("tandem.models")

STARTED = "TANDEM_STARTED_BY_RANK_0"
"""Set for a rank that rank 0 started: it ends when its standard input does."""
_ENDS = 10.0  # seconds that ranks which were told to leave have
_LEFT = 15.0  # seconds that a server has to end by itself once a rank has died


class RankProcesses:
    """Ranks 1 and up, as processes of this one. One that dies ends this process with 1."""

    def __init__(self, give_up: Callable[[int], object] = os._exit) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._give_up = give_up
        self._tell: Callable[[], object] | None = None
        self._ending = False
        self._giving_up: list[threading.Timer] = []
        self.died = threading.Event()

    def start(self, ranks: Ranks, command: Sequence[str]) -> None:
        """`command` is this process's own: a rank differs by its environment alone."""
        for rank in range(1, ranks.degree):
            environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), STARTED: "1"}
            process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE)
            self._processes.append(process)
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank-{rank}", daemon=True).start()

    def serve(self, tell: Callable[[], object]) -> None:
        """From here on ranks end when they are told to leave. `tell`, thread-safe, is called where one dies before."""
        self._tell = tell
        if self.died.is_set():
            tell()

    def end(self, at_once: bool) -> None:
        """Waits for ranks that have been told to leave; kills those that have not, or do not.

        Also cancels the timers by which dead ranks would end this process: from here on its caller decides.
        """
        self._ending = True
        self._cancel_timers()
        for process in self._processes:
            if at_once or self._tell is None:
                process.kill()
            try:
                process.wait(_ENDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdin:
                process.stdin.close()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if self._ending or code == 0:  # it was told to leave
            return
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        log.error("rank %d, process %d, %s: no step can be made without it, stopping", rank, process.pid, how)
        self.died.set()
        if self._tell:
            self._tell()
        giving_up = threading.Timer(_LEFT, self._give_up, (1,))  # this rank may wait for that one in a step, for ever
        giving_up.daemon = True
        self._giving_up.append(giving_up)
        giving_up.start()
        if self._ending:  # meanwhile
            self._cancel_timers()

    def _cancel_timers(self) -> None:
        for giving_up in self._giving_up:
            giving_up.cancel()


@contextlib.contextmanager
def rank_processes(
    ranks: Ranks, command: Sequence[str], give_up: Callable[[int], object] = os._exit
) -> Iterator[RankProcesses]:
    """The other ranks beside this one; none where there are none, or torchrun has started them.

    The environment is meanwhile what torchrun's would be. Ends with SystemExit(1) where a rank died while loading.
    """
    others = RankProcesses(give_up)
    if not ranks.starts:
        yield others
        return
    with _environment(ranks):
        others.start(ranks, command)
        failed = True
        try:
            yield others
            failed = False
        except RuntimeError as error:
            if not others.died.wait(_ENDS / 2):  # its connections break before it is known to have ended
                raise
            log.error("stopped while loading: %s", str(error).partition("\n")[0])
            raise SystemExit(1) from None
        finally:
            others.end(failed or others.died.is_set())


def watched(others: RankProcesses, engine: Engine) -> None:
    """The server is ready: from here on a rank's death is its device's loss. Call it on the event loop."""
    import asyncio

    from models.batcher import DeviceLost

    loop = asyncio.get_running_loop()
    lost = DeviceLost("a process that shares the target has ended")
    others.serve(lambda: loop.call_soon_threadsafe(engine.lose, lost))


def end_with_rank_0(environment: Mapping[str, str] = os.environ) -> None:
    """In a rank that rank 0 has started: ends this process as soon as that one has, however it did."""
    if STARTED in environment:
        threading.Thread(target=_until_closed, name="rank-0", daemon=True).start()


def _until_closed() -> None:
    while os.read(0, 4096):  # not sys.stdin, whose lock would be held at this process's own end
        pass
    os._exit(1)


@contextlib.contextmanager
def _environment(ranks: Ranks, environment: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """What torchrun sets for rank 0. Threads and interface are left as they are where the user has set them."""
    told = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(ranks.degree),
        "LOCAL_WORLD_SIZE": str(ranks.degree),
    }
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    unless = {"OMP_NUM_THREADS": str(max(1, cores // ranks.degree))}
    if any(name == "lo" for _, name in socket.if_nameindex()):
        unless["GLOO_SOCKET_IFNAME"] = "lo"  # all ranks are here, and nobody else needs to reach them
    before = dict(environment)
    environment.update({**told, **{name: value for name, value in unless.items() if name not in environment}})
    try:
        yield
    finally:
        for name in (*told, *unless):
            if name in before:
                environment[name] = before[name]
            else:
                environment.pop(name, None)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
