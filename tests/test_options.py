"""An option is declared once: its flag, both spellings, its default, help and place in a configuration follow."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tandem.cli.option import FILE, OptionParser, built, flags_of, option, switch


@dataclass(frozen=True, kw_only=True)
class Options:
    most_words: int = option("how many", default=7, group="a title")
    words: tuple[str, ...] = option("a word", default=())
    list_file: FILE | None = option("where they are", backends=("nxdi",))
    loud: bool = switch("say it loud")
    share: float | None = option("a share", group="another")
    argv: tuple[str, ...]
    given: frozenset[str]


@dataclass(frozen=True)
class Config:
    most_words: int
    loud: bool
    other: str
    share: float = 0.5


def parser() -> OptionParser[Options]:
    return OptionParser(Options, flags_of(Options), hyphens=True, common=("share",), prog="p")


def test_a_declaration_is_a_flag_in_both_spellings_with_its_type_and_default() -> None:
    for line in ("--most-words 3 --words a --words b --share 0.25 --loud", "--most_words 3 --words a --words b --loud"):
        found = parser().parse_args(line.split())
        assert (found.most_words, found.words, found.loud, found.list_file) == (3, ("a", "b"), True, None)
        assert found.given >= {"most_words", "words", "loud"} and "list_file" not in found.given
    assert parser().parse_args([]) == Options(argv=(), given=frozenset())


def test_help_has_title_value_backend_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "a title: --most-words N how many (default: 7)" in shown
    assert "--list-file FILE nxdi: where they are" in shown
    assert shown.endswith("--loud say it loud") and "common: --share SHARE a share a title: " in shown


def test_a_configuration_is_built_from_the_options_of_its_fields_names() -> None:
    options = parser().parse_args(["--most-words", "3"])
    assert built(Config, options, other="x") == Config(3, False, "x", 0.5)
    assert built(Config, options, other="x", share=None).share is None  # computed, and so passed as it is
    assert built(Config, parser().parse_args(["--share", "1"]), other="x", loud=True) == Config(7, True, "x", 1.0)
