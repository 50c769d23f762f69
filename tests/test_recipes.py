"""Recipes are real: the programs parse and configure their commands, and shown plans are the program's own output."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tandem.cli import compare, configuration, main
from tests.planning.support import CONFIGS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "docs/trainium.md", *sorted((ROOT / "docs/recipes").glob("*.md"))]
BLOCK = re.compile(r"```(bash|text)\n(.*?)```", re.DOTALL)
ASSIGNMENT = re.compile(r"[A-Z][A-Z0-9_]*=\S+")


def words_of(line: str) -> list[str]:
    """Returns the program and its arguments, without environment variables and launcher."""
    words = shlex.split(line, comments=True)
    while ASSIGNMENT.fullmatch(words[0]):
        words.pop(0)
    start = next(i for i, word in enumerate(words) if word in ("main.py", "compare_architectures.py"))
    assert words[0] in ("python", "torchrun"), line
    return words[start:]


def commands_of(page: Path) -> list[str]:
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [line for kind, block in blocks if kind == "bash" for line in block.splitlines() if line.strip()]


COMMANDS = [
    pytest.param(page, line, id=f"{page.stem}-{n}") for page in PAGES for n, line in enumerate(commands_of(page))
]
SERVERS = ("target", "fused_target", "draft_worker")


def options() -> set[str]:
    return set(main.parser()._option_string_actions)


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_a_recipes_command_is_understood(page: Path, line: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    program, *arguments = words_of(line)
    if program == "compare_architectures.py":
        compare.build_config(compare.build_parser().parse_args(arguments))
        return
    args = main.parser().parse_args(arguments)
    if "torchrun" in line:
        processes = re.search(r"--nproc-per-node (\d+)", line)
        assert processes is not None and int(processes[1]) == args.tp_degree
        monkeypatch.setenv("WORLD_SIZE", processes[1])
        monkeypatch.setenv("RANK", "0")
    if args.role in SERVERS or args.role == "compile":
        configured(args)
    elif args.prompt or args.prompt_text:
        configuration.client_config(args)


def configured(args) -> None:
    """Configures a role as far as a machine without the device can."""
    try:
        if args.role == "compile":
            configuration.compile_config(args)
        else:
            configuration.model_config(args, args.target_model or args.model)
    except ValueError as error:
        assert "is not available here" in str(error)
    if args.backend == "nxdi":
        nxdi_build(args)


def nxdi_build(args) -> None:
    """Runs the checks that --backend nxdi makes before it compiles."""
    from tandem.runners.nxdi.build import Kind, Wish, plan_build

    settings, k = configuration.nxdi_settings(args), int(args.speculation_length)
    kind = {"fused_target": Kind.FUSED, "draft_worker": Kind.PLAIN}.get(args.role, Kind.WINDOW if k else Kind.PLAIN)
    build = plan_build(Wish(kind, args.batch, args.sequence_length, k, args.dtype), settings)
    assert build.max_length > args.sequence_length - 2 * (k + 1)


def plan_output(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    arguments = words_of(line.replace("/models/", f"{CONFIGS}/"))[1:]
    assert main.main(arguments) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_plans_of_a_page_are_the_programs_output(page: Path, capsys: pytest.CaptureFixture[str]):
    outputs, shown = "", 0
    for kind, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        if kind == "bash":
            plans = [line for line in block.splitlines() if "--role plan" in line and "/models/" in line]
            outputs = "".join(plan_output(line, capsys) for line in plans) or outputs
            continue
        lines = block.splitlines()
        assert [line for line in lines if line not in outputs] == []
        shown += len(lines)
    assert shown > 2 or page.parent.name != "recipes"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_says_that_nothing_ran_on_a_device(page: Path):
    text = " ".join(page.read_text(encoding="utf-8").split())
    assert re.search(r"not run on one|run on none of them", text)


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.stem)
def test_the_flags_that_correspond_exist(page: Path):
    table = page.read_text(encoding="utf-8").partition("## The seed's flags")[2]
    ours = [row.split("|")[2] for row in table.splitlines() if row.startswith("| ") and "---" not in row]
    assert len(ours) > 8
    known = options() | set(compare.build_parser()._option_string_actions)
    assert {flag for cell in ours for flag in re.findall(r"--[a-z][\w-]*", cell)} - known == set()


@pytest.mark.parametrize("name", ["llama-405b-fp8.json", "llama-405b-fp8-draft.json", "llama-405b-bf16.json"])
def test_a_neuron_config_of_a_recipe_is_an_object(name: str):
    assert isinstance(json.loads((ROOT / "docs/recipes" / name).read_text(encoding="utf-8")), dict)


def test_the_fp8_recipe_leaves_out_what_the_checkpoint_leaves_out():
    """NxD Inference looks up each layer's attention by its exact name, so the configuration lists all of them."""
    config = json.loads((ROOT / "docs/recipes/llama-405b-fp8.json").read_text(encoding="utf-8"))
    kept = set(config["modules_to_not_convert"])
    assert kept == {"lm_head", "layers.0.mlp", "layers.125.mlp", *(f"layers.{n}.self_attn" for n in range(126))}
    assert config["context_encoding_buckets"] == [1024, 2048, 4096, 10240, 12288]
    assert (config["speculation_length"], config["logical_nc_config"]) == (7, 2)
