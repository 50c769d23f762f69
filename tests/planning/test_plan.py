"""What fits, against the cases that AWS documents; and the command's errors and output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.cli import main
from tandem.cli.tools import plan_config
from tandem.host.instances import INSTANCES, instance_named
from tandem.workshops.planning.memory import GRAPH_BYTES, core_of
from tandem.workshops.planning.placement import Placement, parts_of, process_of
from tandem.workshops.planning.plan import Plan, PlanConfig, make_plan
from tests.planning.support import model, planned

SEED_405B = dict(
    batch=1,
    length=12800,
    drafts=6,
    backend="nxdi",
    context_buckets="2048,4096,10240,12288",
    decode_buckets="12800",
)


def fitting(plan: Plan) -> list[int]:
    return [degree.degree for degree, process in plan.degrees if process is not None and process.core.fits]


def placement(plan: Plan, architecture: str) -> Placement:
    return next(p for p in plan.placements if p.architecture == architecture)


# --- the documented cases ---


def test_llama_8b_takes_16_gb_and_fits_on_both_cores_of_a_trn1_2xlarge():
    plan = planned("trn1.2xlarge", "Llama-3.1-8B", batch=1, length=128)
    alone = {degree.degree: process for degree, process in plan.degrees}
    assert round(alone[1].core.weights / 1e9) == 16
    assert fitting(plan) == [2]
    assert plan.placements[0].fits and plan.placements[0].processes[0].cores == 2


def test_the_seeds_pair_fits_fused_on_a_trn1_2xlarge_and_not_apart():
    plan = planned("trn1.2xlarge", "Llama-3.1-8B", "Llama-3.2-1B", batch=2, length=128, drafts=4)
    assert placement(plan, "fused").processes[0].degrees == (2, 2)
    assert not placement(plan, "distributed").fits
    assert any("the draft needs cores elsewhere" in remark for remark in plan.remarks)


def test_in_int8_the_pair_fits_apart_too_on_the_same_two_cores():
    plan = planned("trn1.2xlarge", "Llama-3.1-8B", "Llama-3.2-1B", batch=2, length=128, drafts=4, quantization="int8")
    target, draft = placement(plan, "distributed").processes
    assert (target.cores, draft.cores, placement(plan, "distributed").idle) == (1, 1, 0)
    assert 8e9 < target.core.weights < 9.2e9  # the tables stay in two bytes
    assert placement(plan, "fused").cores == 2


def test_llama_70b_needs_16_cores_of_a_trn1_32xlarge():
    plan = planned("trn1.32xlarge", "Llama-3.1-70B", batch=1, length=4096)
    assert fitting(plan) == [16, 32]
    (alone,) = plan.placements
    assert alone.cores == 16
    together = 16 * (alone.processes[0].core.weights + alone.processes[0].core.kv)
    assert together == pytest.approx(148e9, rel=0.02)  # "about 148GB", on 256 GB of 16 cores


def test_llama_405b_in_bfloat16_needs_all_64_cores_of_a_trn2_48xlarge():
    plan = planned("trn2.48xlarge", "Llama-3.1-405B", **SEED_405B)
    assert fitting(plan) == [64]
    plan = planned("trn2.48xlarge", "Llama-3.1-405B", "Llama-3.2-1B", **SEED_405B)
    assert placement(plan, "fused").processes[0].degrees == (64, 64)
    assert "Llama-3.2-1B's 32 heads are padded to 64" in placement(plan, "fused").processes[0].remarks
    assert not placement(plan, "distributed").fits


def test_llama_405b_in_fp8_leaves_room_for_a_draft_apart():
    plan = planned("trn2.48xlarge", "Llama-3.1-405B-FP8", "Llama-3.2-1B", **SEED_405B, degree=64)
    together = placement(plan, "fused").processes[0]
    assert together.cores == 64 and together.core.fits
    assert together.graphs == 5  # four context buckets, one decode bucket
    apart = placement(plan, "distributed")
    assert apart.cores == 64 and [p.cores for p in apart.processes] == [32, 1] and apart.idle == 31


@pytest.mark.parametrize("degree", [32, 64])
@pytest.mark.parametrize("draft", ["Qwen3-0.6B", "Qwen3-1.7B"])
def test_qwen3_32b_fits_with_either_draft_at_32_and_64(degree: int, draft: str):
    plan = planned("trn2.48xlarge", "Qwen3-32B", draft, backend="nxdi", batch=4, length=6400, drafts=6, degree=degree)
    assert placement(plan, "fused").processes[0].degrees == (degree, degree)
    apart = placement(plan, "distributed")
    assert apart.cores == degree and apart.processes[0].cores == degree // 2


def test_on_torchneuron_qwen3_32b_goes_no_further_than_its_kv_heads():
    plan = planned("trn2.48xlarge", "Qwen3-32B", "Qwen3-1.7B", batch=4, length=1024)
    assert fitting(plan) == [4, 8]
    assert any("--backend nxdi" in remark for remark in plan.remarks)
    assert placement(plan, "fused").processes[0].degrees == (8, 1)  # the draft whole on every core
    with pytest.raises(ValueError, match="tp_degree: 32 on TorchNeuron: 8 KV heads are not divisible by 32"):
        planned("trn2.48xlarge", "Qwen3-32B", degree=32)


# --- a fair comparison, and limits that hold ---


@pytest.mark.parametrize(
    ("instance", "target", "draft"),
    [
        ("trn1.32xlarge", "Llama-3.1-8B", "Llama-3.2-1B"),
        ("trn1.32xlarge", "Llama-3.1-70B", "Llama-3.2-1B"),
        ("inf2.24xlarge", "Llama-3.1-8B", "Llama-3.2-1B"),
        ("trn2.3xlarge", "Llama-3.1-8B", "Llama-3.2-1B"),
        ("trn3-gen2", "Qwen3-32B", "Qwen3-0.6B"),
    ],
)
def test_both_placements_are_given_the_same_cores(instance: str, target: str, draft: str):
    plan = planned(instance, target, draft, batch=2, length=2048)
    together, apart = plan.placements
    assert together.fits and apart.fits
    assert together.cores == apart.cores <= INSTANCES[instance].cores(plan.pair.lnc)
    assert sum(p.cores for p in apart.processes) + apart.idle == apart.cores
    assert all(p.core.fits for p in (*together.processes, *apart.processes))


@pytest.mark.parametrize("backend", ["torch", "nxdi"])
def test_the_largest_loads_fit_and_the_next_ones_do_not(backend: str):
    plan = planned("trn2.3xlarge", "Llama-3.1-8B", "Llama-3.2-1B", backend=backend, batch=2, length=4096)
    process, pair = plan.placements[0].processes[0], plan.pair

    parts, _ = parts_of(pair, process.role, process.cores)
    where = pair.route, process.graphs, pair.capacity
    for rows, longest in process.loads:
        assert core_of(parts, pair.load.resized(rows, longest), *where).fits
        if longest < 131072:
            assert not core_of(parts, pair.load.resized(rows, longest + 128), *where).fits
    assert core_of(parts, pair.load.resized(process.most_rows, 4096), *where).fits
    assert not core_of(parts, pair.load.resized(process.most_rows + 1, 4096), *where).fits


def test_more_cores_or_shorter_sequences_never_need_more_memory():
    plan = planned("trn2.48xlarge", "Qwen3-32B", backend="nxdi", batch=8, length=8192)
    sums = [process.core.total for _, process in plan.degrees if process]
    assert sums == sorted(sums, reverse=True)
    shorter = planned("trn2.48xlarge", "Qwen3-32B", backend="nxdi", batch=8, length=4096)
    assert shorter.degrees[-1][1].core.total < plan.degrees[-1][1].core.total


def test_logical_cores_of_one_physical_core_have_half_the_memory():
    one, two = (planned("trn2.3xlarge", "Llama-3.1-8B", lnc=lnc) for lnc in (1, 2))
    assert (one.pair.instance.cores(1), two.pair.instance.cores(2)) == (8, 4)
    assert 2 * one.pair.capacity == two.pair.capacity == 24 * 2**30
    assert any("share one memory bank" in remark for remark in one.remarks)


def test_graphs_are_counted_by_buckets_and_by_batches():
    pair = ("trn2.3xlarge", "Llama-3.1-8B", "Llama-3.2-1B")
    plain = planned(*pair, backend="nxdi", length=1024)
    assert process_of(plain.pair, "target", 2).graphs == 2  # one length each, as NxD Inference's own default
    nxdi = planned(*pair, backend="nxdi", length=1024, context_buckets="auto", decode_buckets="auto")
    assert nxdi.pair.load.context_buckets == nxdi.pair.load.decode_buckets == (128, 256, 512, 1024)
    assert process_of(nxdi.pair, "fused", 4).graphs == process_of(nxdi.pair, "draft", 1).graphs == 8
    ours = planned(*pair, length=1024, batch=4)
    assert [process_of(ours.pair, role, 1).graphs for role in ("target", "draft", "fused")] == [3, 9, 14]
    single = planned(*pair, length=1024, batch=1)
    assert process_of(single.pair, "fused", 1).graphs == 8
    assert process_of(single.pair, "fused", 1).core.graphs == 8 * GRAPH_BYTES
    asked = planned(*pair, length=1024, batch=8, drafts=5, row_buckets=(1, 4), draft_buckets=(2,))
    assert [process_of(asked.pair, role, 1).graphs for role in ("target", "draft", "fused")] == [4, 19, 29]


# --- refusals ---


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"lnc": 2, "instance": "trn1.2xlarge"}, "lnc: 2 is not one of 1 on trn1.2xlarge"),
        ({"cores": 65}, "core_count: 65 is outside 1 to 64"),
        ({"degree": 6}, "tp_degree: 6 is not one of 1, 2, 4, 8, 16, 32, 64"),
        ({"degree": 16, "cores": 8}, "tp_degree: 16 is not one of 1, 2, 4, 8"),
        ({"length": 131073}, "sequence_length: 131073 is above Llama-3.1-8B's max_position_embeddings 131072"),
        ({"context_buckets": "128"}, "context_buckets: is NxD Inference's"),
        ({"decode_buckets": "512"}, "decode_buckets: is NxD Inference's"),
        ({"row_buckets": (8,)}, "batch_buckets: 8 is outside 1 to 4"),
        ({"draft_buckets": (0,)}, "draft_buckets: 0 is outside 1 to 5"),
        (
            {"backend": "nxdi", "decode_buckets": "256"},
            "decode_buckets: the largest, 256, is below",
        ),
        ({"backend": "nxdi", "decode_buckets": "512,256"}, "decode_buckets: 512,256 does not ascend"),
        ({"backend": "nxdi", "decode_buckets": "1024"}, "decode_buckets: 1024 is above sequence_length 512"),
        ({"backend": "nxdi", "decode_buckets": "many"}, "decode_buckets: 'many' is neither a list of lengths"),
        ({"backend": "nxdi", "context_buckets": "6,512"}, "context_buckets: 6 equals a verification's width"),
        ({"quantization": "int4"}, "quantization: 'int4' is not one of auto, none, int8, f8e4m3, f8e5m2"),
        ({"quantization": "int8"}, "quantization: int8 is NxD Inference's; add --backend nxdi"),
        ({"backend": "toy"}, "backend: 'toy' cannot be planned for"),
        ({"dtype": "int8"}, "dtype: 'int8' is not one of"),
        ({"batch": 0}, "batch: 0 is below 1"),
    ],
)
def test_what_cannot_be_is_refused_by_name(settings: dict[str, object], says: str):
    settings = {"instance": "trn2.48xlarge", "target": "Llama-3.1-8B", **settings}
    with pytest.raises(ValueError) as raised:
        planned(**settings)  # type: ignore[arg-type]
    assert says in str(raised.value)


def test_an_unknown_instance_is_answered_with_the_list():
    with pytest.raises(ValueError) as raised:
        instance_named("trn4.48xlarge")
    assert all(name in str(raised.value) for name in INSTANCES)
    assert instance_named("trn3:36").chips == 36


# --- the command ---


def run(*arguments: str) -> int:
    return main.main(["--role", "plan", *arguments])


def test_the_command_prints_a_plan_and_says_that_it_is_one(capsys: pytest.CaptureFixture[str]):
    pair = ["--target_model", model("Llama-3.1-8B"), "--draft_model", model("Llama-3.2-1B")]
    assert run(*pair, "--instance", "trn1.2xlarge", "--sequence_length", "128", "--batch", "2") == 0
    out = capsys.readouterr().out
    assert "not a measurement" in out and "fused, 2 cores:" in out and "distributed, 2 cores: does not fit" in out
    assert max(len(line) for line in out.splitlines() if line.startswith("  ")) <= 120


def test_the_json_says_the_same(capsys: pytest.CaptureFixture[str]):
    pair = ["--target-model", model("Qwen3-32B"), "--draft-model", model("Qwen3-0.6B"), "--backend", "nxdi"]
    assert run(*pair, "--instance", "trn2.48xlarge", "--tp-degree", "32", "--speculation-length", "6", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["kind"] == "plan, not a measurement"
    assert answer["instance"]["cores"] == 64 and answer["load"]["speculation_length"] == 6
    together, apart = answer["placements"]
    assert together["processes"][0]["tp_degrees"] == [32, 32] and together["fits"]
    assert apart["cores"] == together["cores"] == 32
    bytes_of = together["processes"][0]["bytes_per_core"]
    assert bytes_of["total"] == sum(bytes_of[part] for part in ("weights", "kv", "buffers", "graphs"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "instance: give --instance, one of trn1.2xlarge"),
        (("--instance", "trn1.2xlarge"), "target_model: give --target_model DIR"),
        (("--instance", "p5.48xlarge", "--target_model", "DIR"), "instance: 'p5.48xlarge' is not one of"),
        (("--instance", "trn1.2xlarge", "--target_model", "/nowhere"), "/nowhere/config.json is not there"),
    ],
)
def test_a_refusal_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
):
    assert run(*arguments) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_planning_reads_nothing_but_the_configurations(tmp_path: Path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(Path(model("Llama-3.1-8B"), "config.json").read_text())
    (folder / "model.safetensors").write_text("not weights at all")
    args = main.parser().parse_args(["--role", "plan", "--instance", "trn2.3xlarge", "--model", str(folder)])
    assert fitting(make_plan(plan_config(args))) == [1, 2, 4]


def test_disk_and_host_memory_are_counted_from_the_shapes() -> None:
    fp8 = planned("trn2.48xlarge", "Llama-3.1-405B-FP8", "Llama-3.2-1B", **SEED_405B, degree=64).storage
    assert fp8.checkpoints == pytest.approx(490e9, rel=0.01) and fp8.converted == pytest.approx(487e9, rel=0.01)
    assert fp8.disk == fp8.checkpoints + fp8.converted + fp8.shares + 100e9 and fp8.shares > 2 * fp8.converted
    plain = planned("trn2.48xlarge", "Llama-3.1-405B", **SEED_405B, degree=64)
    assert plain.storage.converted == 0 and plain.storage.loading == pytest.approx(812e9, rel=0.01)
    assert any("812 GB of weights while it loads" in line and "2048 GiB" in line for line in plain.remarks)
    small = planned("inf2.xlarge", "Llama-3.1-8B", "Llama-3.2-1B", batch=1, length=128, drafts=4)
    assert small.storage.disk == 512e9  # AWS asks for no less
    assert any("more than its 16 GiB. Compile on a larger instance" in line for line in small.remarks)


def test_the_time_to_compile_is_graphs_times_minutes() -> None:
    plan = planned("trn2.3xlarge", "Llama-3.1-8B", "Llama-3.2-1B", batch=2, length=4096, compile_minutes=30.0)
    for placement in plan.placements:
        graphs = sum(process.graphs for process in placement.processes)
        said = f"To compile for {placement.architecture}: {graphs} graphs, {graphs / 2:.1f} hours at 30 minutes each"
        assert sum(remark.startswith(said) for remark in plan.remarks) == 1
    with pytest.raises(ValueError, match=r"compile_minutes: 0.0 is not above 0"):
        planned("trn2.3xlarge", "Llama-3.1-8B", compile_minutes=0.0)


def test_a_fused_pair_on_nxd_inference_says_whether_its_models_fit_apart_as_well() -> None:
    tight = planned("trn1.2xlarge", "Llama-3.1-8B", "Llama-3.2-1B", backend="nxdi", batch=1, length=128, drafts=4)
    assert any("too much. Use --pair fused" in remark for remark in tight.remarks)
    wide = planned(
        "trn2.48xlarge", "Qwen3-32B", "Qwen3-1.7B", backend="nxdi", batch=4, length=1024, drafts=6, degree=32
    )
    assert any("which fits (--pair both" in remark for remark in wide.remarks)


# --- EAGLE heads ---


def head_folder(folder: Path, **fields: object) -> str:
    """The config.json of SpecForge's layout, for Llama-3.1-8B: a head as published ones are."""
    own = json.loads(Path(model("Llama-3.1-8B"), "config.json").read_text())
    config = own | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000}
    (folder / "config.json").write_text(json.dumps(config | {"rope_scaling": None} | fields))
    return str(folder)


def with_head(folder: Path, **settings: object) -> Plan:
    head = head_folder(folder)
    asked = {"batch": 4, "length": 2048, "drafts": 5, **settings}
    return make_plan(PlanConfig("trn2.3xlarge", model("Llama-3.1-8B"), head, **asked))  # type: ignore[arg-type]


def test_a_head_is_planned_beside_its_target_with_its_cache_and_the_hidden_states_it_reads(tmp_path: Path) -> None:
    plan = with_head(tmp_path)
    (together,) = plan.placements
    (process,) = together.processes
    assert (together.architecture, process.role, process.degrees) == ("fused", "fused", (1, 1))
    head, hidden, wide = 4096 * 14336 * 3, 4096, 2 * 4096
    head += 3 * hidden * hidden + wide * hidden + 2 * wide * 1024 + hidden * hidden + 32000 * hidden + 4 * hidden
    assert plan.pair.draft is not None and plan.pair.draft.parameters == head
    alone = process_of(plan.pair, "target", 1)
    assert process.core.weights - alone.core.weights == 2 * head
    assert process.core.kv - alone.core.kv == 5 * (2048 + 64 + 6) * 2 * 8 * 128 * 2
    assert process.core.features == 5 * (2048 + 64) * 3 * hidden * 2
    assert process.graphs == 3 + 9, "the target's, and a draft's; none of both"
    assert process.core.total == sum(
        getattr(process.core, part) for part in ("weights", "kv", "features", "buffers", "graphs")
    )


def test_a_heads_parameters_are_those_that_the_head_has(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from tandem.checkpoints.head_config import read_head_config
    from tandem.runners.eagle.module import EagleHead

    plan = with_head(tmp_path)
    with torch.device("meta"):
        made = EagleHead(read_head_config(tmp_path))
    assert plan.pair.draft is not None
    assert plan.pair.draft.parameters == sum(p.numel() for p in made.parameters())


def test_a_head_in_the_layout_of_speculators_has_the_same_plan(tmp_path: Path) -> None:
    plan = with_head(tmp_path)
    own = json.loads((tmp_path / "config.json").read_text())
    named = ("architectures", "draft_vocab_size")
    layer = {name: value for name, value in own.items() if name not in named}
    config = {"speculators_model_type": "eagle3", "draft_vocab_size": 32000, "transformer_layer_config": layer}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = {"batch": 4, "length": 2048, "drafts": 5}
    other = make_plan(PlanConfig("trn2.3xlarge", model("Llama-3.1-8B"), str(tmp_path), **asked))  # type: ignore[arg-type]
    assert other.placements == plan.placements and other.pair.draft == plan.pair.draft


def test_an_eagle1_head_for_nxd_inference_is_counted_with_its_fc(tmp_path: Path) -> None:
    fields = {"architectures": ["LlamaForCausalLM"], "fc_bias": False}
    head = head_folder(tmp_path, **fields)
    plan = make_plan(PlanConfig("trn1.32xlarge", model("Llama-3.1-8B"), head, backend="nxdi", batch=1, length=1024))
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert plan.pair.draft is not None
    assert plan.pair.draft.parameters == layer + 2 * 4096 * 4096 + 4096 + 2 * 128256 * 4096
    assert placement(plan, "fused").fits


def test_a_head_that_does_not_fit_its_place_is_refused_by_name(tmp_path: Path) -> None:
    (together,) = with_head(tmp_path, degree=4).placements
    assert not together.fits and "tp_degree 1 alone" in together.why
    with pytest.raises(ValueError, match="a plan counts it for TorchNeuron alone"):
        with_head(tmp_path, backend="nxdi")
    with pytest.raises(ValueError, match="target_hidden_size: 4096 is not 5120"):
        make_plan(PlanConfig("trn2.3xlarge", model("Qwen3-32B"), head_folder(tmp_path, vocab_size=151936)))
    with pytest.raises(ValueError, match="vocab_size: 128256 is not 151936, as the target needs it"):
        make_plan(PlanConfig("trn2.3xlarge", model("Qwen3-32B"), head_folder(tmp_path)))


def test_the_command_tells_what_a_heads_hidden_states_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = ["--target_model", model("Llama-3.1-8B"), "--draft_model", head_folder(tmp_path)]
    assert run(*pair, "--instance", "trn2.3xlarge", "--sequence_length", "2048") == 0
    out = capsys.readouterr().out
    assert "fused: KV holds 0.26 GB of the target's hidden states" in out and "distributed" not in out
