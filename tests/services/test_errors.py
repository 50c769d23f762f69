"""Bad input: each status with its ErrorInfo, checked before anything is computed. G6, G8, G9."""

from __future__ import annotations

from typing import Any

import pytest
from google.rpc import code_pb2, error_details_pb2

from tandem.rpc.received_errors import TandemError
from tandem.services.statuses import _TABLE, to_status
from tandem.speculation.errors import Outcome, outcome_of
from tests.support import answer, ids, opening, raw_stub, refusal, target_site, until, worker_site


def test_a_field_that_another_server_refused_is_passed_on_by_name() -> None:
    status = to_status(TandemError("INVALID_ARGUMENT", "adapter: ...", reason="INVALID_FIELD", field="adapter"))
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info) and status.details[1].Unpack(bad)
    assert (info.reason, bad.field_violations[0].field) == ("INVALID_FIELD", "adapter")


def test_every_status_that_servers_send_has_its_outcome() -> None:
    faults = {reason for _, code, reason in _TABLE if outcome_of(code_pb2.Code.Name(code)) is Outcome.FAULT}
    assert faults == {"ROW_FAILED"}
    assert outcome_of("DATA_LOSS") is outcome_of("UNKNOWN") is Outcome.FAULT
    assert all(
        outcome_of(code) is outcome for code, outcome in (("UNAVAILABLE", Outcome.GONE), ("ABORTED", Outcome.REFUSED))
    )


@pytest.mark.parametrize(
    ("changes", "value"),
    [({"weights_revision": "toy:9"}, "toy:9"), ({"dtype": "bfloat16"}, "bfloat16"), ({"vocab_size": 259}, "259")],
)
async def test_another_target_than_the_client_expects_is_a_failed_precondition(
    changes: dict[str, Any], value: str
) -> None:
    """G8: whoever answers at this address now."""
    async with target_site() as site, raw_stub(site.address) as target:
        refused = await refusal(target.OpenSession(opening(**changes)))
        assert (refused.code, refused.reason) == ("FAILED_PRECONDITION", "MODEL_MISMATCH")
        assert value in refused.message
        assert site.engine.batcher.steps == 0 and site.free == 4
        same = {"weights_revision": "toy:0", "dtype": "float32", "vocab_size": 258}
        assert (await target.OpenSession(opening(**same))).committed_length == len(opening().prefix)


async def test_a_draft_worker_hands_on_what_its_target_refused() -> None:
    async with (
        target_site() as target,
        worker_site(target.address, reconnect_seconds=0.3) as worker,
        worker.client() as client,
    ):
        target.lifecycle.accepting = False
        with pytest.raises(TandemError, match="stopping") as caught:
            await answer(client.generate, ids(b"abc"))
        assert caught.value.code == "UNAVAILABLE"
        await until(lambda: worker.free == 4)
