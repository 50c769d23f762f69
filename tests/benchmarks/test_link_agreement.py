"""The agreement benchmark: its arithmetic, its arguments, and a short run over the emulated link."""

from __future__ import annotations

import json

import pytest

from benchmarks import link_agreement
from benchmarks.link_agreement import CALLS, COLD, EMULATED, MESSAGES, NETNS, WARM, Figure, disagreements, main, parse


def test_a_disagreement_is_a_share_of_what_the_kernel_measured():
    figures = [
        Figure(EMULATED, 20, MESSAGES, 0.021, 0.02),
        Figure(EMULATED, 50, MESSAGES, 0.051, 0.05),
        Figure(NETNS, 20, MESSAGES, 0.020, 0.02),
    ]
    (found,) = disagreements(figures)
    assert (found.rtt_ms, found.what, found.of_kernel) == (20, MESSAGES, pytest.approx(0.05))


def test_without_another_link_it_says_why_and_gives_the_error_against_the_settings(tmp_path, monkeypatch, capsys):
    class Missing:
        async def __aenter__(self):
            raise ValueError("link: netns needs a moon")

        async def __aexit__(self, *error):
            pass

    monkeypatch.setattr(link_agreement, "NetnsLink", Missing)
    monkeypatch.setattr(link_agreement, "PacketLink", Missing)
    output = tmp_path / "deeper" / "agreement.json"
    flags = ["--rtt_ms", "4", "--samples", "10", "--calls", "3", "--bytes", "20000", "--output", str(output)]
    assert main(flags) == 0
    assert "could not run netns: link: netns needs a moon" in capsys.readouterr().out
    document = json.loads(output.read_text())
    assert len(document["could_not_run"]) == 2
    assert document["disagreements"] == []
    assert [figure["what"] for figure in document["figures"]] == [MESSAGES, CALLS, WARM, COLD]
    assert all(figure["p50_s"] >= figure["expected_s"] >= 0.004 for figure in document["figures"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rtt-ms", "20000"], "--rtt-ms: 20000 is not between 0 and 10000"),
        (["--rtt-ms", "5,0"], "0 is not above 0"),
        (["--bandwidth-mbps", "0"], "--bandwidth-mbps: 0 is not between"),
    ],
)
def test_bad_arguments_are_one_line(flags, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        parse(flags)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
