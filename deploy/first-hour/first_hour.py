"""One hour on one Trainium instance, from `doctor` to a bundle to send back. README.md of this folder says how.

    python deploy/first-hour/first_hour.py trn2.3xlarge           # every step that is not done yet
    python deploy/first-hour/first_hour.py trn2.3xlarge --print   # only says what would be typed
    python deploy/first-hour/first_hour.py same RESULTS           # fails if tokens are not plain decoding's

Each step is a command of its own, is timed, and writes its log and its state; done steps are not repeated. It needs
nothing but Python: Tandem's own commands do the work.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from bundle import differing, make_bundle
from plans import PLANS, HourPlan, Step

ROOT = Path(__file__).resolve().parents[2]
STATE = "state.json"
TAIL = 15


def read_state(folder: Path) -> dict[str, float | None]:
    """Seconds of the steps that were taken; None: failed. Raises ValueError if the file is another program's."""
    file = folder / STATE
    if not file.exists():
        return {}
    try:
        state = json.loads(file.read_text())
        return {str(name): None if seconds is None else float(seconds) for name, seconds in state.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file}: is not a state of this script ({error}); remove it, or give another --folder"
        ) from None


def write_state(folder: Path, state: dict[str, float | None]) -> None:
    fresh = folder / f"{STATE}.new"
    fresh.write_text(json.dumps(state, indent=2) + "\n")
    fresh.replace(folder / STATE)


def run_step(step: Step, folder: Path) -> float | None:
    """Returns the seconds it took; None: a command failed."""
    began = time.monotonic()
    with (folder / f"{step.name}.log").open("w", encoding="utf-8") as log:
        for command in step.commands:
            print(f"\n[{step.name}] {shlex.join(command)}", flush=True)
            with subprocess.Popen(
                [sys.executable if word == "python" else word for word in command],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            ) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    log.write(line)
                    if step.shown:
                        print(line, end="", flush=True)
            if process.returncode:
                return None
    return time.monotonic() - began


def failure(plan: HourPlan, step: Step, folder: Path) -> str:
    """The end of the step's log, the known error, and the next command."""
    log = folder / f"{step.name}.log"
    tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:])
    again = shlex.join(["python", "deploy/first-hour/first_hour.py", plan.name, "--folder", str(folder)])
    doctor = ["main.py", "--role", "doctor", "--log", str(log)]
    known = subprocess.run([sys.executable, *doctor], cwd=ROOT, capture_output=True, text=True, check=False)
    found = known.stdout if known.returncode == 0 else ""
    return f"{tail}\n{found}step {step.name} failed; all of it is in {log}\nnext: {step.hint}\nthen: {again}"


def run_plan(plan: HourPlan, folder: Path, despite: str | None = None) -> int:
    """Takes the steps that are not done; `despite`: a failed one to pass over. Returns 1 at a failure, else 0."""
    folder.mkdir(parents=True, exist_ok=True)
    state = read_state(folder)
    if despite is not None and despite not in state:
        raise ValueError(f"despite: no step {despite} has been taken in {folder}")
    for step in plan.steps(folder):
        before = state.get(step.name)
        if before is not None or (step.name in state and step.name == despite):
            print(f"[{step.name}] {'failed before' if before is None else f'done before, in {before:.0f} s'}")
            continue
        state[step.name] = took = run_step(step, folder)
        write_state(folder, state)
        if took is None:
            print(failure(plan, step, folder))
            return 1
        late = "" if took <= 60 * step.minutes else f", above the {step.minutes:g} minutes that were allowed for"
        print(f"[{step.name}] done in {took:.0f} s{late}")
    bundle = make_bundle(plan, folder, state)
    print(f"\n{sum(seconds or 0.0 for seconds in state.values()) / 60:.1f} minutes")
    print(
        f"read {folder / 'measured' / 'report.html'}; send back {bundle}, which has no secrets; then end the instance"
    )
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    words = argparse.ArgumentParser(prog="first_hour.py", description=__doc__.partition("\n")[0] if __doc__ else None)
    words.add_argument("plan", choices=[*PLANS, "same"], help="where this runs, or what to do")
    words.add_argument("paths", nargs="*", type=Path, help="of same: folders of comparisons' results")
    words.add_argument(
        "--folder", type=Path, help="where state, logs and results are (default: results/first-hour-PLAN)"
    )
    words.add_argument("--models", type=Path, default=Path("/models"), help="folder of the models (default: /models)")
    words.add_argument("--despite", metavar="STEP", help="go on although this step failed; the bundle says that it did")
    words.add_argument("--print", action="store_true", dest="dry", help="print the commands, and run none")
    return words.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        if args.plan == "same":
            found = [line for folder in args.paths for line in differing(folder)]
            print("\n".join(found) or "every answer has plain decoding's tokens")
            return 1 if found else 0
        if args.paths:
            raise ValueError(f"{args.paths[0]}: only same takes paths")
        plan = PLANS[args.plan](args.models)
        folder = (args.folder or ROOT / "results" / f"first-hour-{plan.name}").resolve()
        if args.dry:
            for step in plan.steps(folder):
                print(f"# {step.name}: at most {step.minutes:g} minutes")
                print("\n".join(shlex.join(command) for command in step.commands))
            return 0
        return run_plan(plan, folder, args.despite)
    except ValueError as error:
        print(f"first_hour.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
