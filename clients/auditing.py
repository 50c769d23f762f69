"""Verifies some of a remote target's rounds again, here or at a second target, and says what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tandem.rpc.credentials import Credentials
from tandem.rpc.endpoint_pool import disagreement
from tandem.rpc.errors import TandemError
from tandem.rpc.remote_session import RemoteSession
from tandem.rpc.verifier_client import VerifierClient
from tandem.rpc.verify_stream import RemoteVerifier
from tandem.speculation.common_prefix import common
from tandem.speculation.errors import InvalidField, WrongType
from tandem.speculation.loop import Verifier
from tandem.speculation.retry import Persistence
from tandem.speculation.types import ModelInfo, Request, SparseDistribution, SpeculationStats, Verdict

log = logging.getLogger("tandem.audit")


@dataclass(frozen=True, slots=True)
class WrongRound:
    """A round for which the auditor committed other tokens than the target.

    `position`: of the first token that differs, counted from the prompt's first token.
    """

    position: int
    claimed: tuple[int, ...]
    verified: tuple[int, ...]


@dataclass(slots=True)
class Audit:
    """What auditing found so far. `failed`: rounds that the auditor could not verify.

    `same_arithmetic`: whether target and auditor say that their bits are the same; if not, a wrong round may be a tie.
    """

    rounds: int = 0
    audited: int = 0
    failed: int = 0
    wrong: list[WrongRound] = field(default_factory=list)
    same_arithmetic: bool = True


class Auditor(Protocol):
    """Verifies rounds of one request again, at any lengths that ascend."""

    async def verify(self, tokens: Sequence[int], draft: Sequence[int]) -> Verdict: ...

    async def close(self) -> None: ...


class AuditorFactory(Protocol):
    """Makes an auditor for each request of a session; `info` describes its model."""

    info: ModelInfo

    def begin(self, request: Request, prompt: Sequence[int]) -> Auditor: ...

    async def close(self) -> None: ...


class SecondTarget:
    """Audits at another TargetVerifier."""

    def __init__(self, client: VerifierClient, info: ModelInfo) -> None:
        self._client, self.info = client, info

    @classmethod
    async def connected(cls, address: str, credentials: Credentials | None, seconds: float) -> SecondTarget:
        client = VerifierClient(address, "", persistence=Persistence(0.0), credentials=credentials)
        try:
            return cls(client, await client.model_info(seconds))
        except BaseException:
            with contextlib.suppress(Exception):
                await client.close()
            raise

    def begin(self, request: Request, prompt: Sequence[int]) -> Auditor:
        stats = SpeculationStats()
        session = RemoteSession(self._client, request, stats)
        return _RemoteAuditor(session, RemoteVerifier(session, stats), tuple(prompt))

    async def close(self) -> None:
        await self._client.close()


class _RemoteAuditor:
    def __init__(self, session: RemoteSession, verifier: RemoteVerifier, prompt: Sequence[int]) -> None:
        self._session, self._verifier, self._prompt = session, verifier, prompt
        self._held: tuple[int, ...] = ()

    async def verify(self, tokens: Sequence[int], draft: Sequence[int]) -> Verdict:
        """Verifies a round; rounds between the last one and this one are given with the prefix."""
        if not self._held:
            await self._verifier.open(self._prompt)
            self._held = tuple(self._prompt)
        if self._held != tuple(tokens):
            await self._session.resume(tokens)
        verdict = await self._verifier.verify(tokens, draft)
        self._held = (*tokens, *verdict.token_ids)
        return verdict

    async def close(self) -> None:
        await self._verifier.close()


def check_auditor(target: ModelInfo, auditor: AuditorFactory, found: Audit) -> None:
    """Notes in `found` whether both must have the same bits. Raises InvalidField if the auditor has another model."""
    info = auditor.info
    if (other := disagreement(target, info)) is not None:
        raise InvalidField("auditor", other.replace("this client started with", "the target has"))
    found.same_arithmetic = bool(info.arithmetic) and info.arithmetic == target.arithmetic


def check_audit(share: object, auditor: object) -> None:
    """Checks what a caller gives for auditing. Raises WrongType, InvalidField."""
    if not isinstance(share, int | float) or isinstance(share, bool):
        raise WrongType("audit", "a number from 0 to 1", share)
    if not 0 <= share <= 1:
        raise InvalidField("audit", f"{share} is outside 0 to 1")
    if not isinstance(auditor, str):
        raise WrongType("auditor", 'a string, "HOST:PORT" or a model', auditor)
    if bool(share) != bool(auditor):
        raise InvalidField("auditor", "give audit and auditor together: how many rounds, and who verifies them again")


async def opened_auditor(
    auditor: str, target: ModelInfo, credentials: Credentials | None, seconds: float, found: Audit
) -> AuditorFactory:
    """Connects to the auditor, or loads it. Raises TandemError; InvalidField if it is another model than the target."""
    made: AuditorFactory
    if _is_address(auditor):
        made = await SecondTarget.connected(auditor, credentials, seconds)
    else:
        made = await _loaded(auditor, target)
    try:
        check_auditor(target, made, found)
    except InvalidField:
        await made.close()
        raise
    return made


def _is_address(auditor: str) -> bool:
    _, colon, port = auditor.rpartition(":")
    return bool(colon) and port.isdecimal() and not Path(auditor).exists()


async def _loaded(model: str, target: ModelInfo) -> AuditorFactory:
    from tandem.clients.local_auditor import LocalTarget  # which loads models

    try:
        return await LocalTarget.loaded(model, target)
    except TandemError:
        raise
    except ValueError as error:
        raise InvalidField("auditor", str(error)) from None


class AuditedVerifier:
    """Wraps a verifier: the auditor verifies a random `share` of its rounds again, while later rounds run.

    `audit` counts what came of it.
    """

    def __init__(
        self, verifier: Verifier, auditor: AuditorFactory, request: Request, share: float, audit: Audit
    ) -> None:
        self._verifier, self._auditor, self._request, self._share = verifier, auditor, request, share
        self.audit, self._chance = audit, random.SystemRandom()
        self._rounds: asyncio.Queue[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None] = asyncio.Queue()
        self._prompt: tuple[int, ...] = ()
        self._working: asyncio.Task[None] | None = None

    async def open(self, prompt: Sequence[int]) -> None:
        self._prompt = tuple(prompt)
        await self._verifier.open(prompt)

    async def verify(
        self, tokens: Sequence[int], draft: Sequence[int], distributions: Sequence[SparseDistribution] = ()
    ) -> Verdict:
        verdict = await self._verifier.verify(tokens, draft, distributions)
        self.audit.rounds += 1
        if self._chance.random() < self._share:
            self._rounds.put_nowait((tuple(tokens), tuple(draft), verdict.token_ids))
            self._working = self._working or asyncio.create_task(self._work(), name="audit")
        return verdict

    async def _work(self) -> None:
        """Verifies rounds again until the last. Once the auditor has failed, the rest of the request's fail too."""
        auditor, broken = self._auditor.begin(self._request, self._prompt), False
        try:
            while (each := await self._rounds.get()) is not None:
                tokens, draft, claimed = each
                try:
                    verified = claimed if broken else (await auditor.verify(tokens, draft)).token_ids
                except (TandemError, RuntimeError) as error:
                    log.warning("audit: %s", error)
                    broken = True
                self.audit.failed += broken
                self.audit.audited += not broken
                if not broken and verified != claimed:
                    self._differs(tokens, claimed, verified)
                    await auditor.close()  # its session holds the tokens that it committed
                    auditor = self._auditor.begin(self._request, self._prompt)
        finally:
            await auditor.close()

    def _differs(self, tokens: tuple[int, ...], claimed: tuple[int, ...], verified: tuple[int, ...]) -> None:
        found = WrongRound(len(tokens) + common(claimed, verified), claimed, verified)
        self.audit.wrong.append(found)
        log.warning("audit: position %d: the target said %s, the auditor %s", found.position, claimed, verified)

    async def close(self) -> None:
        """Closes the verifier; then waits for the rounds that are still audited."""
        await self._verifier.close()
        if self._working:
            self._rounds.put_nowait(None)
            await self._working
