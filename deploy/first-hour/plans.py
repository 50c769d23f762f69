"""The steps of the first hour by kind of machine: commands, minutes, and what to type after a failure."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Command = tuple[str, ...]
RANKS = "torch.distributed.run --nproc-per-node"


@dataclass(frozen=True)
class Step:
    """`minutes`: expected; `most`: until it is ended. `hint`: typed after a failure. `shown`: print the output."""

    name: str
    commands: tuple[Command, ...]
    minutes: float
    most: float
    hint: str
    shown: bool = True


@dataclass(frozen=True)
class HourPlan:
    """A machine, its pair, and flags. One speculation length, since another one needs other graphs.

    `smoke`: arguments of smoke.py, by number of ranks. `roles`: flags of `--role plan`; empty: no such step. `prompts`:
    flags of what is measured. `dollars`: of an hour, on demand.
    """

    name: str
    pair: str
    smoke: tuple[str, ...]
    roles: str
    compare: str
    compile: tuple[str, ...]
    drafts: int
    rows: int
    prompts: str
    minutes: float
    dollars: float = 0.0

    def steps(self, folder: Path) -> list[Step]:
        """The steps in order, with results below `folder`."""
        compare = f"python compare_architectures.py {self.compare} --speculation-length {self.drafts}"
        doctor = "python main.py --role doctor"
        rows = ",".join(str(n) for n in sorted({1, self.rows}))
        probe = (
            f"{compare} --architectures autoregressive,distributed,fused --concurrency {rows}"
            f" --max-num-completed-requests {2 * self.rows} --max-new-tokens 24 --workloads counting_and_lists"
            f" --prompts-per-workload 1 --output-dir {folder}/probe"
        )
        measure = (
            f"{compare} --architectures autoregressive,distributed,never_waiting,fused --rtt-ms 0,20,50"
            f" {self.prompts} --output-dir {folder}/measured"
        )
        logs = f"read the servers' own logs in {{}}/logs, or {doctor} --log FILE of one".format
        differs = f"if tokens differ, read {folder}/probe/report.html, and --despite probe goes on; if not, "
        steps = [_step("doctor", 1, 5, doctor, doctor, f"{doctor} --json")]
        small = "no larger model will do better: send the bundle; if tokens differ by rounding, --despite smoke goes on"
        if self.smoke:
            smoke = "deploy/first-hour/smoke.py"
            ranks = [f"python {each.format(smoke)} --folder {folder}/smoke" for each in self.smoke]
            steps.append(_step("smoke", 10, 30, small, *ranks))
        if self.roles:
            hint = "hf download, as the page says, then python main.py --role plan --help"
            steps.append(_step("plan", 1, 5, hint, f"python main.py --role plan --instance {self.name} {self.roles}"))
        if self.compile:
            hint = "search the log with doctor --log; compiled graphs are kept, so compiling goes on where it ended"
            steps.append(_step("compile", 25, 150, hint, *self.compile))
        same = f"python deploy/first-hour/first_hour.py same {folder}/probe"
        packages = (("python", "-m", "pip", "list", "--format", "freeze"),)
        return [
            *steps,
            _step("probe", self.minutes, 5 * self.minutes, differs + logs(folder / "probe"), probe, same),
            _step("measure", self.minutes, 5 * self.minutes, logs(folder / "measured"), measure),
            Step("versions", packages, 1, 5, "python -m pip --version", False),
        ]


def _step(name: str, minutes: float, most: float, hint: str, *commands: str) -> Step:
    return Step(name, tuple(tuple(shlex.split(command)) for command in commands), minutes, most, hint)


def _trn2(models: Path) -> HourPlan:
    target, draft, sizes = f"{models}/Qwen3-4B", f"{models}/Qwen3-0.6B", "512 --dtype bfloat16"
    pair = f"--target_model {target} --draft_model {draft}"
    sized = f"{pair} --batch 1 --sequence_length {sizes} --speculation_length 4"
    ranked = f"python -m {RANKS}"
    common = f"main.py --role compile --device neuron {sized} --compiled_dir {models}/compiled"
    return HourPlan(
        "trn2.3xlarge",
        "Qwen3-4B with Qwen3-0.6B",
        smoke=("{} neuron", f"-m {RANKS} 2 {{}} neuron --ranks 2"),
        roles=f"--tp_degree 4 {sized}",
        compare=f"--device neuron --model {target} --draft-model {draft} --tp-degree 4 --cores 0-3 --batch 1"
        f" --sequence-length {sizes} --compiled-dir {models}/compiled --startup-timeout 3600",
        compile=(
            f"{ranked} 4 {common} --tp_degree 4 --compile_for target,fused",
            f"{ranked} 2 {common} --tp_degree 2 --compile_for target",
            f"python {common} --compile_for draft --cores 0",
        ),
        drafts=4,
        rows=1,
        prompts="--prompts-per-workload 2 --max-new-tokens 64",
        minutes=12,
        dollars=2.235,
    )


def _trn1(models: Path) -> HourPlan:
    target, draft, sizes = f"{models}/Llama-3.1-8B", f"{models}/Llama-3.2-1B", "256 --dtype bfloat16"
    pair = f"--target_model {target} --draft_model {draft}"
    sized = f"--tp_degree 2 --batch 1 --sequence_length {sizes} --speculation_length 4"
    common = f"python main.py --role compile --backend nxdi {sized} --compiled_dir {models}/compiled"
    return HourPlan(
        "trn1.2xlarge",
        "Llama-3.1-8B with Llama-3.2-1B",
        smoke=("{} nxdi", "{} nxdi --ranks 2"),
        roles=f"--backend nxdi {pair} {sized}",
        compare=f"--backend nxdi --model {target} --draft-model {draft} --tp-degree 2 --draft-device cpu --batch 1"
        f" --sequence-length {sizes} --compiled-dir {models}/compiled --startup-timeout 3600",
        compile=(
            f"{common} --target_model {target} --compile_for target",
            f"{common} {pair} --compile_for fused --pair fused",
        ),
        drafts=4,
        rows=1,
        prompts="--prompts-per-workload 1 --max-new-tokens 64",
        minutes=12,
        dollars=1.34,
    )


def _cpu(models: Path) -> HourPlan:
    # Three workloads: fewer cannot be compared.
    prompts = "--workloads counting_and_lists,code,prose --prompts-per-workload 1 --max-new-tokens 16"
    compare = "--sequence-length 256 --batch 2"
    return HourPlan(
        "cpu", "the embedded pair", ("{} cpu",), "", compare, (), drafts=3, rows=2, prompts=prompts, minutes=4
    )


def _toy(models: Path) -> HourPlan:
    prompts = "--workloads counting_and_lists --prompts-per-workload 1 --max-new-tokens 8"
    compare = "--backend toy --sequence-length 512 --batch 2"
    return HourPlan("toy", "no model", (), "", compare, (), drafts=3, rows=2, prompts=prompts, minutes=1)


PLANS: dict[str, Callable[[Path], HourPlan]] = {"trn2.3xlarge": _trn2, "trn1.2xlarge": _trn1, "cpu": _cpu, "toy": _toy}
"""By name, from the models' folder. cpu and toy need no device."""
