"""Lists of cores, as flags and environment variables have them."""

from __future__ import annotations

import pytest

from tandem.host.cores import format_cores, parse_cores, share_of


@pytest.mark.parametrize(
    ("text", "cores", "written"),
    [("0", (0,), "0"), ("0-3", (0, 1, 2, 3), "0-3"), ("0-1,8", (0, 1, 8), "0,1,8"), ("5,4", (5, 4), "5,4")],
)
def test_a_list_is_read_and_written(text: str, cores: tuple[int, ...], written: str) -> None:
    assert parse_cores(text) == cores and format_cores(cores) == written
    assert parse_cores(written) == cores


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "'' is not a list of cores"),
        ("a", "'a' is not a list of cores"),
        ("1-", "'1-' is not a list of cores"),
        ("3-1", "3-1 is not a range of cores"),
        ("0-9999999", "0-9999999 is not a range of cores"),
        ("0-2,1", "a core of '0-2,1' is named twice"),
    ],
)
def test_what_is_no_list_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"^draft-cores: {why}"):
        parse_cores(text, "draft-cores")


def test_ranks_get_equal_shares() -> None:
    assert [share_of((4, 5, 6, 7), rank, 2) for rank in range(2)] == [(4, 5), (6, 7)]
    with pytest.raises(ValueError, match="cores: 3 of them cannot be divided among 2 ranks"):
        share_of((0, 1, 2), 0, 2)
