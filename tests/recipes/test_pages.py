"""Recipes are real: the programs parse and configure their commands, and shown plans are the program's own output."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from tandem.cli import compare, main
from tandem_nxdi.build import Build
from tests.deploy import in_image
from tests.planning.support import CONFIGS
from tests.recipes import ours, programs
from tests.recipes.page import BLOCK, PAGES, ROOT, Command, commands_of

FIRST_HOUR = ROOT / "deploy/first-hour/README.md"
WITH_THE_INDEX = (ROOT / "docs/trainium.md", *PAGES)
COMMANDS = [
    pytest.param(command, id=f"{page.stem}-{n}")
    for page in WITH_THE_INDEX
    for n, command in enumerate(commands_of(page))
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_recipes_command_is_understood(command: Command, monkeypatch: pytest.MonkeyPatch):
    if command.program.endswith(".py"):
        assert ours.check(command, monkeypatch)
    else:
        assert programs.check(command.words)


def plan_output(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    command = Command(ROOT, line.replace("/models/", f"{CONFIGS}/"))
    assert main.main(command.arguments) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("page", WITH_THE_INDEX, ids=lambda page: page.stem)
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
def test_a_comparison_of_a_page_loads_what_the_page_compiled(page: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder is named by the configuration it was compiled for; any other is compiled again, for hours."""
    monkeypatch.chdir(ROOT)
    made: list[Build] = []
    compared: list[Build] = []
    for command in commands_of(page):
        if command.program == "compare_architectures.py" and "nxdi" in command.words:
            servers = [words for words in ours.compared_servers(command, monkeypatch) if "nxdi" in words]
            compared += [ours.nxdi_build(main.parser().parse_args(words)) for words in servers]
        elif command.program == "main.py" and "nxdi" in command.words and "plan" not in command.words:
            made.append(ours.nxdi_build(main.parser().parse_args(command.arguments)))

    def shape(build: Build) -> tuple[object, ...]:
        return build.kind, build.neuron["tp_degree"], build.neuron["batch_size"]

    alike = [build for build in compared if shape(build) in map(shape, made)]
    assert any(build.draft is not None for build in alike)
    assert [build for build in alike if build not in made] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_disk_of_a_page_holds_what_its_plans_add_up_to(page: Path, capsys: pytest.CaptureFixture[str]):
    text = page.read_text(encoding="utf-8")
    plans = [plan_output(line, capsys) for line in text.splitlines() if "python main.py --role plan" in line]
    needed = [int(re.search(r"^Disk: ([\d,]+) GB", plan, re.MULTILINE)[1].replace(",", "")) for plan in plans]
    volumes = [int(size) * 2**30 / 1e9 for size in re.findall(r"VolumeSize=(\d+)", text)]
    if "eksctl create cluster -f deploy/eks/cluster.yaml" in text:  # its nodes' root volumes
        groups = yaml.safe_load((ROOT / "deploy/eks/cluster.yaml").read_text(encoding="utf-8"))["managedNodeGroups"]
        volumes += [group["volumeSize"] * 2**30 / 1e9 for group in groups if group["instanceType"].startswith("trn")]
    assert plans and volumes
    together = sum(needed) if "FP8" in text else max(needed)  # that page serves both checkpoints it plans
    assert all(volume >= max(together, 512) for volume in volumes)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_an_image_with_nxd_inference_is_asked_for_by_an_sdk_that_has_it(page: Path):
    text = page.read_text(encoding="utf-8")
    images = re.findall(r"describe-images .*", text)
    assert all("Neuron SDK 2." in image for image in images)
    assert "_nxd_inference/bin" not in text or re.search(r"Neuron SDK 2\.(28\.1|31)\*", "".join(images))


INSTALLING = (*PAGES, FIRST_HOUR, *(ROOT / "docs" / f"trainium-{name}.md" for name in ("nxdi", "torchneuron")))


@pytest.mark.parametrize("page", INSTALLING, ids=lambda page: page.stem)
def test_what_a_page_installs_is_all_that_servers_and_comparisons_import(page: Path):
    """Beside what AWS's image has; an install with --no-deps brings none of what Tandem needs."""
    text = page.read_text(encoding="utf-8")
    steps = re.findall(r"pip install -r requirements-(neuron|nxdi)\.txt\n.*pip install (.*)", text)
    assert steps or "docker build" in text
    for kind, rest in steps:
        base = in_image.BASES["torchneuron" if kind == "neuron" else kind]
        words = [f"requirements-{kind}.txt", *shlex.split(rest)]
        present = in_image.closure([*base, *in_image.asked(words)])
        wanted = {"grpcio", "numpy", "protobuf", "transformers", "safetensors", "tokenizers", "jinja2", "matplotlib"}
        wanted |= {"rich", "h11", "uvicorn", "llguidance", "prometheus-client", "cryptography"}
        assert wanted - present == set(), page


def test_the_first_hour_begins_with_an_image_that_has_its_software_and_a_disk_as_large_as_aws_asks_for():
    text = FIRST_HOUR.read_text(encoding="utf-8")
    assert "Neuron torch-neuronx 2.14*" in text and "*Neuron SDK 2.33*" in text
    assert "--instance-type trn2.3xlarge" in text and "VolumeSize=512" in text
    assert "source /opt/aws_neuronx_venv_torch_neuronx_2_14_0/bin/activate" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_flags_that_correspond_exist(page: Path):
    table = page.read_text(encoding="utf-8").partition("## The seed's flags")[2]
    ours = [row.split("|")[2] for row in table.splitlines() if row.startswith("| ") and "---" not in row]
    assert len(ours) > 8
    known = set(main.parser()._option_string_actions) | set(compare.build_parser()._option_string_actions)
    known |= {flag for flags in programs.KNOWN.values() for flag in flags.split()}
    assert {flag for cell in ours for flag in re.findall(r"--[a-z][\w-]*", cell)} - known == set()


@pytest.mark.parametrize("page", [*PAGES, FIRST_HOUR], ids=lambda page: page.stem)
def test_who_downloads_models_on_an_instance_may_write_where_they_go(page: Path):
    """The user of AWS's images is ubuntu, and `/` is root's."""
    lines = [command.line for command in commands_of(page)]
    download = next(at for at, line in enumerate(lines) if line.startswith("hf download"))
    assert "sudo install -d -o ubuntu /models" in lines[:download] or not any("run-instances" in line for line in lines)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_model_that_a_command_names_was_downloaded_or_made_before(page: Path):
    made = {"compiled", "Llama-3.1-8B-int8"}  # folders that the programs fill
    for command in commands_of(page):
        assert "/mnt/" not in command.line, "no page mounts anything"
        for before, word in itertools.pairwise(command.words):
            for name in re.findall(r"/models/([\w.-]+)", word):
                if before in ("--local-dir", "--output"):
                    made.add(name)
                elif "plan" not in command.words:  # a plan reads config.json, which the hub shows
                    assert name in made, command.line


@pytest.mark.parametrize("name", ["llama-405b-fp8.json", "llama-405b-bf16.json"])
def test_a_neuron_config_with_kernels_has_no_context_bucket_that_aws_warns_of(name: str):
    config = json.loads((ROOT / "docs/recipes" / name).read_text(encoding="utf-8"))
    assert config["attn_kernel_enabled"] and config["mlp_kernel_enabled"] and config["enable_bucketing"]
    assert min(config["context_encoding_buckets"]) > 1024  # NxDI's own would begin at 128


def test_the_fp8_recipe_leaves_out_what_the_checkpoint_leaves_out():
    """NxD Inference looks up each layer's attention by its exact name, so the configuration lists all of them."""
    config = json.loads((ROOT / "docs/recipes/llama-405b-fp8.json").read_text(encoding="utf-8"))
    kept = set(config["modules_to_not_convert"])
    assert kept == {"lm_head", "layers.0.mlp", "layers.125.mlp", *(f"layers.{n}.self_attn" for n in range(126))}
    assert config["context_encoding_buckets"] == [2048, 4096, 10240, 12288]
    assert (config["speculation_length"], config["logical_nc_config"]) == (7, 2)
