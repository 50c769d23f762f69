"""One hour on one Trainium instance, from `doctor` to a bundle to send back. README.md of this folder says how.

    python deploy/first-hour/first_hour.py trn2.3xlarge           # every step that is not done yet
    python deploy/first-hour/first_hour.py trn2.3xlarge --print   # only says what would be typed
    python deploy/first-hour/first_hour.py same RESULTS           # fails if tokens are not plain decoding's

Each step is a command of its own, is timed and limited, and writes its log and its state; done steps are not repeated.
A bundle is written however it ends. It needs nothing but Python: Tandem's own commands do the work.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

sys.path.insert(0, str(Path(__file__).parent))

from bundle import differing, keep_bundle
from plans import PLANS, Command, HourPlan, Step

ROOT = Path(__file__).resolve().parents[2]
STATE = "state.json"
TAIL = 15
GRACE = 10.0  # seconds from SIGTERM to SIGKILL


Outcome = tuple[str, float]
"""How a step ended (done, failed, too long or interrupted), and its seconds."""


def read_state(folder: Path) -> dict[str, Outcome]:
    """Raises ValueError if the file is another program's."""
    file = folder / STATE
    if not file.exists():
        return {}
    try:
        return {name: (str(status), float(took)) for name, (status, took) in json.loads(file.read_text()).items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file}: is not a state of this script ({error}); remove it, or give another --folder"
        ) from None


def write_state(folder: Path, state: dict[str, Outcome]) -> None:
    fresh = folder / f"{STATE}.new"
    fresh.write_text(json.dumps(state, indent=2) + "\n")
    fresh.replace(folder / STATE)


def run_step(step: Step, folder: Path, most_minutes: float) -> Outcome:
    """Runs the step's commands, each line to its log, and ends those that run longer. Raises OSError: a full disk."""
    began = time.monotonic()
    with (folder / f"{step.name}.log").open("w", encoding="utf-8") as log:
        for command in step.commands:
            print(f"\n[{step.name}] {shlex.join(command)}", flush=True)
            left = 60 * most_minutes - (time.monotonic() - began)
            status = _run_command(command, log, left, step.shown)
            if status != "done":
                return status, time.monotonic() - began
    return "done", time.monotonic() - began


def _run_command(command: Command, log: TextIO, seconds: float, shown: bool) -> str:
    late = threading.Event()
    with subprocess.Popen(
        [sys.executable if word == "python" else word for word in command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # servers and ranks end with it
    ) as process:

        def end() -> None:
            late.set()
            _end(process)

        timer = threading.Timer(max(0.0, seconds), end)
        timer.daemon = True  # an interruption may come before it can be cancelled
        try:
            timer.start()
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                if shown:
                    print(line, end="", flush=True)
        except BaseException:
            _end(process)
            raise
        finally:
            timer.cancel()
    return "too long" if late.is_set() else "failed" if process.returncode else "done"


def _end(process: subprocess.Popen[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            return


def failure(plan: HourPlan, step: Step, folder: Path, status: str) -> str:
    """The end of the step's log, the known error, and the next command."""
    log = folder / f"{step.name}.log"
    tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:])
    again = shlex.join(["python", "deploy/first-hour/first_hour.py", plan.name, "--folder", str(folder)])
    doctor = ["main.py", "--role", "doctor", "--log", str(log)]
    known = subprocess.run([sys.executable, *doctor], cwd=ROOT, capture_output=True, text=True, check=False)
    found = known.stdout if known.returncode == 0 else ""
    ended = "failed" if status == "failed" else f"ended: {status}"
    return f"{tail}\n{found}step {step.name} {ended}; all of it is in {log}\nnext: {step.hint}\nthen: {again}"


def run_plan(plan: HourPlan, folder: Path, despite: str | None = None, most_minutes: float | None = None) -> int:
    """Takes the steps that are not done; `despite`: a failed one to pass over. Returns 1 at a failure, else 0.

    A bundle is written at any end: a failure, a step above `most_minutes` (default: its own limit), Ctrl-C, a lost
    connection, a full disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = read_state(folder)
    if despite is not None and despite not in state:
        raise ValueError(f"despite: no step {despite} has been taken in {folder}")
    try:
        stopped = _take_steps(plan, folder, state, despite, most_minutes)
    finally:
        bundle = keep_bundle(plan, folder, state)
        print(f"\n{sum(took for _, took in state.values()) / 60:.1f} minutes; send back {bundle}: it has no secrets")
    if not stopped:
        print(f"read {folder / 'measured' / 'report.html'}; then end the instance")
    return int(stopped)


def _take_steps(
    plan: HourPlan, folder: Path, state: dict[str, Outcome], despite: str | None, most_minutes: float | None
) -> bool:
    """Takes the steps in order; returns whether one stopped the plan."""
    for step in plan.steps(folder):
        status, took = state.get(step.name, ("", 0.0))
        if status == "done" or (status and step.name == despite):
            print(f"[{step.name}] {status} before, in {took:.0f} s")
            continue
        began = time.monotonic()
        try:
            status, took = run_step(step, folder, most_minutes or step.most)
        except BaseException:
            status, took = "interrupted", time.monotonic() - began
            raise
        finally:
            state[step.name] = status, took
            write_state(folder, state)
        if status != "done":
            print(failure(plan, step, folder, status))
            return True
        late = "" if took <= 60 * step.minutes else f", above the {step.minutes:g} minutes expected"
        print(f"[{step.name}] done in {took:.0f} s{late}")
    return False


def parse(argv: list[str] | None) -> argparse.Namespace:
    words = argparse.ArgumentParser(prog="first_hour.py", description=__doc__.partition("\n")[0] if __doc__ else None)
    words.add_argument("plan", choices=[*PLANS, "same"], help="where this runs, or what to do")
    words.add_argument("paths", nargs="*", type=Path, help="of same: folders of comparisons' results")
    words.add_argument(
        "--folder", type=Path, help="where state, logs and results are (default: results/first-hour-PLAN)"
    )
    words.add_argument("--models", type=Path, default=Path("/models"), help="folder of the models (default: /models)")
    words.add_argument("--despite", metavar="STEP", help="go on although this step failed; the bundle says that it did")
    words.add_argument(
        "--most-minutes", type=float, metavar="N", help="end any step after this long (default: what --print says)"
    )
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
                print(f"# {step.name}: {_minutes(plan, step.minutes)}, at most {_minutes(plan, step.most)}")
                print("\n".join(shlex.join(command) for command in step.commands))
            return 0
        if args.most_minutes is not None and args.most_minutes <= 0:
            raise ValueError(f"most-minutes: {args.most_minutes:g} is not above 0")
        for number in (signal.SIGTERM, signal.SIGHUP):  # a lost connection
            signal.signal(number, signal.default_int_handler)
        return run_plan(plan, folder, args.despite, args.most_minutes)
    except (ValueError, OSError) as error:
        print(f"first_hour.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _minutes(plan: HourPlan, minutes: float) -> str:
    return f"{minutes:g} minutes" + (f" (${plan.dollars * minutes / 60:.2f})" if plan.dollars else "")


if __name__ == "__main__":
    sys.exit(main())
