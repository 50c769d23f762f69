"""What holds the promises, taken away piece by piece: code is swapped in where it is used, and back again."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

from tests import planting


@dataclass(frozen=True, slots=True)
class Mutant:
    """`old` in the function `where` (module:qualified.name) becomes `new`. `cases` of the conformance suite must fail;
    `schedules`: fault schedules must find it too, under one of these rules of the validator."""

    name: str
    where: str
    old: str
    new: str
    cases: tuple[str, ...]
    schedules: tuple[str, ...] = ()


def planted(mutant: Mutant) -> AbstractContextManager[None]:
    """The mutant instead of the original, for everybody who holds the function. Raises PlaceGone."""
    return planting.planted(mutant.name, mutant.where, mutant.old, mutant.new)


FENCE = "tandem.services.sessions.table:Session.fence"
RUN = "tandem.speculation.run_on:SelfPacedRun"

# Its case needs callers that say who they are: tests/reliability/test_ownership.py.
OWNERSHIP = Mutant(
    "sessions belong to nobody",
    "tandem.services.security.identity:caller",
    "return _CALLER.get()",
    "return ANONYMOUS",
    (),
)

# What a row is told about its wait is checked by arithmetic: tests/engine/test_batcher.py.
_QUEUED, _HANDED_OUT = "rows[0].since - waiting.since", "tandem.engine.batcher:Batcher._hand_out"
QUEUE_SECONDS = (
    Mutant("a row's own wait has the wrong sign", _HANDED_OUT, _QUEUED, "rows[0].since + waiting.since", ()),
    Mutant("per-row queue seconds have the wrong sign", _HANDED_OUT, _QUEUED, "waiting.since - rows[0].since", ()),
    Mutant("all rows waited as long as the first", _HANDED_OUT, _QUEUED, "0.0", ()),
)

# Likewise: a caller who shows two tokens.
FIRST_TOKEN_COUNTS = Mutant(
    "of two tokens the first counts",
    "tandem.services.security.identity:IdentityLayer._of_token",
    "if len(given) != 1 or",
    "if not given or",
    (),
)

MUTANTS = (
    OWNERSHIP,
    FIRST_TOKEN_COUNTS,
    Mutant(
        "the fence is gone",
        FENCE,
        "if base_length == len(self.tokens):\n        return Fence.APPLY",
        "if True:\n        return Fence.APPLY",
        ("lost_reply_is_replayed", "stale_round_applies_nothing", "two_rounds_at_once_commit_once"),
        ("once", "growth", "committed", "output"),
    ),
    Mutant(
        "the fence does not look at the last token",
        FENCE,
        " or self.tokens[base_length - 1] != last_token",
        "",
        ("stale_round_applies_nothing",),
        ("committed", "output", "replay", "finished"),
    ),
    Mutant(
        "the reply is not recorded",
        "tandem.services.sessions.table:Session.commit",
        "self.recorded_base, self.recorded = len(self.tokens), reply",
        "pass",
        ("lost_reply_is_replayed", "two_rounds_at_once_commit_once"),
        ("replay",),
    ),
    Mutant(
        "a round older than the last one is replayed too",
        FENCE,
        "if base_length == self.recorded_base else Fence.STALE",
        "if self.recorded is not None else Fence.STALE",
        ("stale_round_applies_nothing",),
        ("replay", "committed", "output"),
    ),
    Mutant(
        "a round is answered, but not committed",
        "tandem.services.sessions.table:Session.commit",
        "self.tokens += tokens",
        "pass",
        ("rounds_commit_the_targets_own", "lost_reply_is_replayed"),
        ("stale", "finished", "replay"),
    ),
    Mutant(
        "an open id takes any prefix",
        "tandem.services.sessions.table:Session.resume",
        "if prefix[:common] != self.tokens[:common]:",
        "if False:",
        ("reopen_with_other_prefix_is_refused",),
    ),
    Mutant(
        "an open id takes any sampling",
        "tandem.services.sessions.table:Session.resume",
        "if getattr(request, name) != getattr(self.request, name):",
        'if name != "sampling" and getattr(request, name) != getattr(self.request, name):',
        ("reopen_with_other_prefix_is_refused",),
    ),
    Mutant(
        "a cancelled open keeps its slot",
        "tandem.services.sessions.checkout:Checkout.using",
        "            await self._free(session)",
        "            pass",
        ("cancelled_open_frees_slot",),
    ),
    Mutant(
        "a cancelled Generate keeps its slot",
        "tandem.engine.fused_rounds:FusedRounds.close",
        "self._target.close()",
        "pass",
        ("cancel_frees_slot",),
        ("answered", "finished"),
    ),
    Mutant(
        "an expired session keeps its slot",
        "tandem.services.sessions.checkout:Checkout.expire",
        "await self._free(session)",
        "pass",
        ("expired_session_is_not_found",),
    ),
    Mutant(
        "a closed session keeps its slot",
        "tandem.services.sessions.checkout:Checkout.drop",
        "await self._free(session)",
        "pass",
        ("close_frees_slot_once", "full_server_refuses_with_retry_info"),
        ("answered", "finished"),
    ),
    Mutant(
        "a closed session is still there",
        "tandem.services.sessions.table:SessionTable.forget",
        "self._sessions.pop(session_id, None)",
        "self._sessions.get(session_id)",
        ("close_frees_slot_once",),
    ),
    Mutant(
        "a client gives up at once",
        "tandem.speculation.retry:RetryBudget.wait",
        "if spent + pause >= persistence.seconds or now + pause >= self._end:",
        "if self.attempts >= 1:",
        (),
        ("finished",),
    ),
    Mutant(
        "a draining server takes new work",
        "tandem.services.lifecycle:Lifecycle.check",
        "if not self.accepting:",
        "if False:",
        ("drain_refuses_new_and_finishes_running",),
    ),
    Mutant(
        "nobody compares tokenizers",
        "tandem.services.target_verifier:TargetVerifierService._check_open",
        "if request.tokenizer_sha256 and request.tokenizer_sha256 != self._info.tokenizer_sha256:",
        "if False:",
        ("tokenizer_mismatch",),
    ),
    Mutant(
        "nobody checks token ids",
        "tandem.engine.generator:check_tokens",
        "if not 0 <= token < vocab_size:",
        "if False:",
        ("bad_open_fields", "bad_round_fields", "bad_fields_are_named"),
    ),
    Mutant(
        "a full server does not say when to ask again",
        "tandem.services.errors:_details",
        "messages.append(_retry(RETRY_SECONDS))",
        "pass",
        ("full_server_refuses_with_retry_info",),
    ),
    Mutant(
        "a run does not care what was read",
        f"{RUN}.next_draft",
        "min(self._until, self._acknowledged + self._max_unread)",
        "self._until",
        ("run_obeys_its_window",),
    ),
    Mutant(
        "a run goes beyond its limit",
        f"{RUN}.next_draft",
        "min(self._until, self._acknowledged",
        "min(self._until + 3, self._acknowledged",
        ("run_pauses_at_its_limit",),
        ("limits", "output", "finished"),
    ),
    Mutant(
        "a stop token does not end a run",
        f"{RUN}.note_stops",
        "not self._stops.isdisjoint(token_ids)",
        "False",
        ("run_ends_at_a_stop_token",),
    ),
    Mutant(
        "the first message of a run is not fenced",
        "tandem.services.verify_runs:VerifyRuns._begun",
        "if fence is Fence.STALE:",
        "if False:",
        ("run_first_message_is_fenced",),
    ),
    Mutant(
        "a run goes on beside another",
        "tandem.services.verify_runs:VerifyRuns._begun",
        "session.resources.end_run()",
        "pass",
        ("run_ends_when_others_commit",),
    ),
    Mutant(
        "drafts on other tokens are verified",
        f"{RUN}.receive",
        " and self.tokens[base - 1] == message.last_token",
        "",
        ("run_drops_drafts_on_other_tokens",),
    ),
    Mutant(
        "late drafts are not cut to what is committed",
        f"{RUN}._keep",
        "draft[len(late) :]",
        "draft",
        ("run_takes_late_drafts",),
    ),
)
