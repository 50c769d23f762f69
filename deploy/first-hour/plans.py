"""Declares the steps of the first hour by kind of machine: commands, time limits, and what to do after a failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Command = tuple[str, ...]
ARCHITECTURES = "autoregressive,distributed,never_waiting,fused"
LINKS = "0,20,50"


@dataclass(frozen=True)
class Step:
    """Commands that are done together; `minutes`: what is allowed for; `hint`: what to type if one fails."""

    name: str
    commands: tuple[Command, ...]
    minutes: float
    hint: str
    shown: bool = True


@dataclass(frozen=True)
class Shape:
    """What is served: the flags of models and sizes, as roles and the comparison spell them."""

    roles: Command
    compare: Command
    compile: tuple[Command, ...]
    drafts: int
    rows: int
    prompts: Command
    minutes_compiling: float
    minutes_measuring: float


@dataclass(frozen=True)
class Plan:
    """A machine, its price (on demand, US dollars an hour), the pair, and its shape.

    Every comparison of a plan has one speculation length: with graphs, another length is other graphs to compile.
    """

    name: str
    dollars: float
    pair: str
    shape: Shape
    instance: str | None = None

    def steps(self, folder: Path) -> list[Step]:
        """The steps, in order. Their results are below `folder`."""
        shape, doctor = self.shape, ("python", "main.py", "--role", "doctor")
        compare = ("python", "compare_architectures.py", *shape.compare)
        drafts = str(shape.drafts)
        steps = [Step("doctor", (doctor, (*doctor, "--json")), 1, "python main.py --role doctor")]
        if self.instance is not None:
            plan = ("python", "main.py", "--role", "plan", "--instance", self.instance, *shape.roles)
            steps.append(
                Step("plan", (plan,), 1, "hf download, as the page says, then python main.py --role plan --help")
            )
        if shape.compile:
            hint = "read docs/errors.md; compiled graphs are kept, so compiling goes on where it ended"
            steps.append(Step("compile", shape.compile, shape.minutes_compiling, hint))
        probe = (
            *compare, "--architectures", "autoregressive,distributed,fused", "--speculation-length", drafts,
            "--concurrency", ",".join(str(n) for n in sorted({1, shape.rows})),
            "--max-num-completed-requests", str(2 * shape.rows),
            "--max-new-tokens", "24", "--workloads", "counting_and_lists", "--prompts-per-workload", "1",
            "--output-dir", str(folder / "probe"),
        )  # fmt: skip
        measure = (
            *compare, "--architectures", ARCHITECTURES, "--speculation-length", drafts, "--rtt-ms", LINKS,
            *shape.prompts, "--output-dir", str(folder / "measured"),
        )  # fmt: skip
        same = ("python", "deploy/first-hour/same_tokens.py", str(folder / "probe"))
        logs = "read the servers' own logs in {}/logs, or python main.py --role doctor --log FILE of one".format
        differs = f"if tokens differ, read {folder}/probe/report.html, and --despite probe goes on; if not, "
        return [
            *steps,
            Step("probe", (probe, same), shape.minutes_measuring, differs + logs(folder / "probe")),
            Step("measure", (measure,), shape.minutes_measuring, logs(folder / "measured")),
            Step(
                "versions",
                (("python", "-m", "pip", "list", "--format", "freeze"),),
                1,
                "python -m pip --version",
                False,
            ),
        ]


def minutes_of(plan: Plan) -> float:
    """What the steps may take at most, together."""
    return sum(step.minutes for step in plan.steps(Path("results")))


def price_of(minutes: float, dollars: float) -> str:
    """Says what `minutes` cost at so many dollars an hour; EC2 bills by the second, a minute at least."""
    return f"${max(minutes, 1) / 60 * dollars:.2f}"


def _trn2(models: Path) -> Plan:
    target, draft = str(models / "Qwen3-4B"), str(models / "Qwen3-0.6B")
    compiled = ("--compiled_dir", str(models / "compiled"))
    sizes = ("--batch", "1", "--sequence_length", "512", "--dtype", "bfloat16")
    pair = ("--target_model", target, "--draft_model", draft)
    common = (
        "main.py",
        "--role",
        "compile",
        "--device",
        "neuron",
        *pair,
        *sizes,
        "--speculation_length",
        "4",
        *compiled,
    )
    ranks = ("torchrun", "--nproc-per-node")
    return Plan(
        "trn2.3xlarge",
        2.235,
        "Qwen3-4B with Qwen3-0.6B",
        Shape(
            roles=(*pair, "--tp_degree", "4", *sizes, "--speculation_length", "4"),
            compare=(
                "--device", "neuron", "--model", target, "--draft-model", draft, "--tp-degree", "4", "--cores", "0-3",
                "--batch", "1", "--sequence-length", "512", "--dtype", "bfloat16", "--compiled-dir", compiled[1],
                "--startup-timeout", "3600",
            ),
            compile=(
                (*ranks, "4", *common, "--tp_degree", "4", "--compile_for", "target,fused"),
                (*ranks, "2", *common, "--tp_degree", "2", "--compile_for", "target"),
                ("python", *common, "--compile_for", "draft", "--cores", "0"),
            ),
            drafts=4,
            rows=1,
            prompts=("--prompts-per-workload", "2", "--max-new-tokens", "64"),
            minutes_compiling=25,
            minutes_measuring=12,
        ),
        "trn2.3xlarge",
    )  # fmt: skip


def _trn1(models: Path) -> Plan:
    target, draft = str(models / "Llama-3.1-8B"), str(models / "Llama-3.2-1B")
    compiled = ("--compiled_dir", str(models / "compiled"))
    sizes = ("--tp_degree", "2", "--batch", "1", "--sequence_length", "256", "--dtype", "bfloat16")
    pair = ("--target_model", target, "--draft_model", draft)
    common = (
        "python",
        "main.py",
        "--role",
        "compile",
        "--backend",
        "nxdi",
        *sizes,
        "--speculation_length",
        "4",
        *compiled,
    )
    return Plan(
        "trn1.2xlarge",
        1.34,
        "Llama-3.1-8B with Llama-3.2-1B",
        Shape(
            roles=("--backend", "nxdi", *pair, *sizes, "--speculation_length", "4"),
            compare=(
                "--backend", "nxdi", "--model", target, "--draft-model", draft, "--tp-degree", "2",
                "--draft-device", "cpu", "--batch", "1",
                "--sequence-length", "256", "--dtype", "bfloat16", "--compiled-dir", compiled[1],
                "--startup-timeout", "3600",
            ),
            compile=(
                (*common, "--target_model", target, "--compile_for", "target"),
                (*common, *pair, "--compile_for", "fused"),
            ),
            drafts=4,
            rows=1,
            prompts=("--prompts-per-workload", "1", "--max-new-tokens", "64"),
            minutes_compiling=25,
            minutes_measuring=12,
        ),
        "trn1.2xlarge",
    )  # fmt: skip


def _cpu(models: Path) -> Plan:
    return Plan(
        "cpu",
        0.0,
        "the embedded pair",
        Shape(
            roles=(),
            compare=("--sequence-length", "256", "--batch", "2"),
            compile=(),
            drafts=3,
            rows=2,
            prompts=(
                *("--workloads", "counting_and_lists,code,prose"),  # three: fewer cannot be compared
                *("--prompts-per-workload", "1", "--max-new-tokens", "16"),
            ),
            minutes_compiling=0,
            minutes_measuring=4,
        ),
    )


def _toy(models: Path) -> Plan:
    return Plan(
        "toy",
        0.0,
        "no model",
        Shape(
            roles=(),
            compare=("--backend", "toy", "--sequence-length", "512", "--batch", "2"),
            compile=(),
            drafts=3,
            rows=2,
            prompts=("--workloads", "counting_and_lists", "--prompts-per-workload", "1", "--max-new-tokens", "8"),
            minutes_compiling=0,
            minutes_measuring=1,
        ),
    )


PLANS: dict[str, Callable[[Path], Plan]] = {"trn2.3xlarge": _trn2, "trn1.2xlarge": _trn1, "cpu": _cpu, "toy": _toy}
"""By name; each is given the folder of the models. cpu and toy stand in where there is no device."""


def price_table() -> list[str]:
    """The page's table of minutes and prices."""
    plans = [PLANS[name](Path("/models")) for name in ("trn2.3xlarge", "trn1.2xlarge")]
    steps = {step.name: step.minutes for step in plans[0].steps(Path("results"))}
    rows = ["| | " + " | ".join(f"{plan.name}, ${plan.dollars:g} an hour" for plan in plans) + " |", "|---|---|---|"]
    for name in steps:
        minutes = [next(s.minutes for s in plan.steps(Path("results")) if s.name == name) for plan in plans]
        cells = (f"{m:g} min, {price_of(m, plan.dollars)}" for m, plan in zip(minutes, plans, strict=True))
        rows.append(f"| `{name}` | " + " | ".join(cells) + " |")
    together = (f"{minutes_of(plan):g} min, {price_of(minutes_of(plan), plan.dollars)}" for plan in plans)
    return [*rows, "| together | " + " | ".join(together) + " |"]
