"""Starts, watches and ends the other ranks, if torchrun does not."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence

from tandem import launch
from tandem.engine.batcher import Batcher
from tandem.engine.engine import Engine
from tandem.engine.load_models import load, load_pair
from tandem.engine.model_config import ModelConfig
from tandem.host.cores import usable_cores
from tandem.runners.torch.tensor_parallel import Leader, Ranks, follow

log = logging.getLogger("tandem.engine")

STARTED = "TANDEM_STARTED_BY_RANK_0"  # environment variable of a rank that ends when its standard input is closed
_ENDS = 10.0  # seconds that ranks have to end after they were asked to end
_LEFT = 15.0  # seconds that a server has to end by itself after a rank has died


class RankProcesses:
    """Ranks 1 and up as child processes. If one dies, this process exits with 1."""

    def __init__(self, give_up: Callable[[int], object] = os._exit) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._give_up = give_up
        self._on_death: Callable[[], object] | None = None
        self._ending = False
        self._giving_up: list[threading.Timer] = []
        self.died = threading.Event()

    def start(self, ranks: Ranks, command: Sequence[str]) -> None:
        """Starts the ranks with this process's `command` and their environments."""
        for rank in range(1, ranks.degree):
            environment = {**launch.environment(), "RANK": str(rank), "LOCAL_RANK": str(rank), STARTED: "1"}
            process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE)
            self._processes.append(process)
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank-{rank}", daemon=True).start()

    def serve(self, on_death: Callable[[], object]) -> None:
        """From now on `end` waits for ranks, and the death of one calls `on_death`, which is thread-safe."""
        self._on_death = on_death
        if self.died.is_set():
            on_death()

    def end(self, at_once: bool) -> None:
        """Waits for ranks and kills those that do not end (all if `at_once`); cancels exit timers."""
        self._ending = True
        self._cancel_timers()
        for process in self._processes:
            if at_once or self._on_death is None:
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
        if self._ending or code == 0:  # it was asked to end
            return
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        log.error("rank %d, process %d, %s: every step needs it, so this server stops", rank, process.pid, how)
        self.died.set()
        if self._on_death:
            self._on_death()
        giving_up = threading.Timer(_LEFT, self._give_up, (1,))  # this rank may wait in a step for the dead one forever
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
    """Runs the other ranks, if any, in torchrun's environment. Raises SystemExit(1) if one died loading."""
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
            if not others.died.wait(_ENDS / 2):  # its connections break before its end is noticed
                raise
            log.error("stopped while loading: %s", str(error).partition("\n")[0])
            raise SystemExit(1) from None
        finally:
            others.end(failed or others.died.is_set())


def lose_engine_with_ranks(others: RankProcesses, engine: Engine) -> None:
    """Makes a rank's death a loss of the engine's device, once serving; on the event loop."""
    import asyncio

    from tandem.engine.batcher import DeviceLost

    loop = asyncio.get_running_loop()
    lost = DeviceLost("a process that shares the target has ended")
    others.serve(lambda: loop.call_soon_threadsafe(engine.lose, lost))


def end_with_rank_0(environment: Mapping[str, str] = os.environ) -> None:
    """In a rank started by rank 0: ends this process when rank 0 ends."""
    if STARTED in environment:
        threading.Thread(target=_until_closed, name="rank-0", daemon=True).start()


def _until_closed() -> None:
    while os.read(0, 4096):  # not sys.stdin, whose lock would be held when this process ends
        pass
    os._exit(1)


@contextlib.contextmanager
def _environment(ranks: Ranks, environment: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Sets torchrun's variables for rank 0, except thread count and interface."""
    always = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(launch.free_port()),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(ranks.degree),
        "LOCAL_WORLD_SIZE": str(ranks.degree),
    }
    unless = {"OMP_NUM_THREADS": str(max(1, usable_cores() // ranks.degree))}
    if any(name == "lo" for _, name in socket.if_nameindex()):
        unless["GLOO_SOCKET_IFNAME"] = "lo"  # all ranks run on this machine
    before = dict(environment)
    environment.update({**always, **{name: value for name, value in unless.items() if name not in environment}})
    try:
        yield
    finally:
        for name in (*always, *unless):
            if name in before:
                environment[name] = before[name]
            else:
                environment.pop(name, None)


log = logging.getLogger("tandem.engine")


async def run_follower(config: ModelConfig, drafts: bool) -> int:
    """Follows rank 0 until it stops; returns the exit code. Raises ValueError."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    end_with_rank_0()
    batcher = Batcher("follower")
    try:
        target, draft = await load_pair(config, batcher) if drafts else (await load(config, batcher), None)
        leaders = [loaded.runner for loaded in (target, draft) if loaded is not None]
        runners = [leader.runner for leader in leaders if isinstance(leader, Leader)]
        assert isinstance(target.runner, Leader)
        log.info("rank %d follows", config.ranks.rank)
        await batcher.on_device(follow, target.runner.link, runners)
    except ValueError:
        raise
    except Exception:
        log.exception("rank %d failed", config.ranks.rank)
        return 1
    finally:
        await batcher.close()
    return 0
