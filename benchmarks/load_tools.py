"""Runs load tools of others, pinned in virtual environments of their own, and reads their reports."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

TORCH = "torch==2.13.0"  # guidellm needs any build; the CPU's where the index has one
SEED = 42  # the same texts and arrivals in every run


class ToolFailed(RuntimeError):
    """A tool could not be installed or did not finish; one line."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The lengths of requests in tokens, as in LLMPerf."""

    name: str
    mean_input_tokens: int
    mean_output_tokens: int
    stddev_input_tokens: int = 0
    stddev_output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a tool with greedy requests that ignore ends of sequence."""

    url: str
    model: str
    tokenizer: str
    shape: Shape
    requests: int
    seconds: float  # or `requests`, whichever comes first
    users: int | None = None  # at once, or Poisson arrivals at `rate` per second
    rate: float | None = None

    @property
    def load(self) -> str:
        return f"{self.users} at once" if self.rate is None else f"{self.rate:.2g} requests/s"


@dataclass(frozen=True, slots=True)
class ToolFigures:
    """A tool's report under common names; None: not reported. Percentiles are over requests."""

    completed: int
    errors: int
    requests_per_minute: float | None
    output_tokens_per_second: float | None
    ttft_p50_ms: float | None
    ttft_p90_ms: float | None
    itl_p50_ms: float | None
    itl_p90_ms: float | None
    latency_p50_ms: float | None
    input_tokens: float | None
    output_tokens: float | None
    accepted_tokens: float | None = None  # of drafts, per request, in the server's usage


class Tool(Protocol):
    """A load tool."""

    @property
    def name(self) -> str: ...

    @property
    def pins(self) -> Sequence[str]: ...

    def command(self, binaries: Path, run: Run, folder: Path) -> list[str]:
        """Returns the command of a run that writes into a folder."""

    def environment(self) -> Mapping[str, str]:
        """Returns additional environment variables."""

    def figures(self, folder: Path) -> ToolFigures:
        """Reads a run's report. Raises ToolFailed."""


@dataclass(frozen=True, slots=True)
class GuideLLM:
    """guidellm, of the vLLM project."""

    name: str = "guidellm"
    pins: Sequence[str] = ("guidellm==0.8.1", TORCH)
    file: str = "guidellm.json"

    def command(self, binaries: Path, run: Run, folder: Path) -> list[str]:
        profile = f"kind=concurrent,streams={run.users}" if run.rate is None else f"kind=poisson,rate={run.rate}"
        backend = {"kind": "openai_http", "target": run.url, "model": run.model, "extras": {"body": {"temperature": 0}}}
        shape = run.shape
        lengths = {
            "prompt_tokens": shape.mean_input_tokens,
            "prompt_tokens_stdev": shape.stddev_input_tokens or None,
            "output_tokens": shape.mean_output_tokens,
            "output_tokens_stdev": shape.stddev_output_tokens or None,
        }
        data = ",".join(f"{key}={value}" for key, value in lengths.items() if value is not None)
        return [
            str(binaries / "guidellm"), "run",
            "--backend", json.dumps(backend),
            "--tokenizer", f"kind=hf_auto,model={run.tokenizer}",
            "--profile", profile,
            "--constraint", f"kind=max_requests,count={run.requests}",
            "--constraint", f"kind=max_duration,seconds={run.seconds}",
            "--seed", f"kind=static,value={SEED}",
            "--data", f"kind=synthetic_text,{data}",
            "--output", f"kind=json,path={folder / self.file}",
            "--disable-console",
        ]  # fmt: skip

    def environment(self) -> Mapping[str, str]:
        return {"HF_HUB_OFFLINE": "1"}

    def figures(self, folder: Path) -> ToolFigures:
        found = _read(self.name, folder / self.file)
        try:
            (benchmark,) = found["benchmarks"]
            metrics, totals = benchmark["metrics"], benchmark["metrics"]["request_totals"]
            done = {name: of["successful"] for name, of in metrics.items() if isinstance(of, dict) and name in _GUIDE}
            seconds = benchmark["duration"]
            return ToolFigures(
                completed=int(totals["successful"]),
                errors=int(totals["errored"]),
                requests_per_minute=60 * totals["successful"] / seconds if seconds else None,
                output_tokens_per_second=_mean(done["output_tokens_per_second"]),
                ttft_p50_ms=_percentile(done["time_to_first_token_ms"], "p50"),
                ttft_p90_ms=_percentile(done["time_to_first_token_ms"], "p90"),
                itl_p50_ms=_percentile(done["inter_token_latency_ms"], "p50"),
                itl_p90_ms=_percentile(done["inter_token_latency_ms"], "p90"),
                latency_p50_ms=_milli(_percentile(done["request_latency"], "p50")),
                input_tokens=_mean(done["prompt_token_count"]),
                output_tokens=_mean(done["output_token_count"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ToolFailed(f"{self.name}: its report has another form: {type(error).__name__}: {error}") from None


_GUIDE = (
    "output_tokens_per_second",
    "time_to_first_token_ms",
    "inter_token_latency_ms",
    "request_latency",
    "prompt_token_count",
    "output_token_count",
)


def _mean(of: Mapping[str, Any] | None) -> float | None:
    return None if not of or of["mean"] is None else float(of["mean"])


def _percentile(of: Mapping[str, Any] | None, name: str) -> float | None:
    return None if not of or of["percentiles"][name] is None else float(of["percentiles"][name])


def _milli(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


@dataclass(frozen=True, slots=True)
class AIPerf:
    """aiperf, of NVIDIA's Dynamo project."""

    name: str = "aiperf"
    pins: Sequence[str] = ("aiperf==0.13.0",)
    file: str = "profile_export_aiperf.json"

    def command(self, binaries: Path, run: Run, folder: Path) -> list[str]:
        shape = run.shape
        load = (
            ["--concurrency", str(run.users)]
            if run.rate is None
            else ["--request-rate", f"{run.rate}", "--arrival-pattern", "poisson"]
        )
        return [
            str(binaries / "aiperf"), "profile", "-m", run.model, "--url", run.url,
            "--endpoint-type", "chat", "--streaming", "--tokenizer", run.tokenizer, *load,
            "--request-count", str(run.requests),
            "--benchmark-duration", f"{run.seconds}", "--benchmark-grace-period", "0",
            "--synthetic-input-tokens-mean", str(shape.mean_input_tokens),
            "--synthetic-input-tokens-stddev", str(shape.stddev_input_tokens),
            "--output-tokens-mean", str(shape.mean_output_tokens),
            "--output-tokens-stddev", str(shape.stddev_output_tokens),
            "--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0",
            "--use-server-token-count", "--random-seed", str(SEED), "--no-gpu-telemetry", "--no-server-metrics",
            "--output-artifact-dir", str(folder), "--ui", "none",
        ]  # fmt: skip

    def environment(self) -> Mapping[str, str]:
        return {}

    def figures(self, folder: Path) -> ToolFigures:
        found = _read(self.name, next(folder.rglob(self.file), folder / self.file))
        try:
            good = round(_of(found, "request_count") or 0)
            return ToolFigures(
                completed=good,
                errors=round(_of(found, "completed_request_count") or good) - good,  # "completed" includes errors
                requests_per_minute=_per_minute(_of(found, "request_throughput")),
                output_tokens_per_second=_of(found, "output_token_throughput"),
                ttft_p50_ms=_of(found, "time_to_first_token", "p50"),
                ttft_p90_ms=_of(found, "time_to_first_token", "p90"),
                itl_p50_ms=_of(found, "inter_token_latency", "p50"),
                itl_p90_ms=_of(found, "inter_token_latency", "p90"),
                latency_p50_ms=_of(found, "request_latency", "p50"),
                input_tokens=_of(found, "input_sequence_length"),
                output_tokens=_of(found, "output_sequence_length"),
                accepted_tokens=_of(found, "usage_accepted_prediction_tokens"),
            )
        except (TypeError, ValueError) as error:
            raise ToolFailed(f"{self.name}: its report has another form: {type(error).__name__}: {error}") from None


def _of(found: Mapping[str, Any], metric: str, statistic: str = "avg") -> float | None:
    value = (found.get(metric) or {}).get(statistic)
    return None if value is None else float(value)


def _per_minute(per_second: float | None) -> float | None:
    return None if per_second is None else 60 * per_second


TOOLS: Mapping[str, Tool] = {tool.name: tool for tool in (GuideLLM(), AIPerf())}


def _read(tool: str, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ToolFailed(f"{tool}: it left no report: {error}") from None
    if not isinstance(found, dict):
        raise ToolFailed(f"{tool}: its report is no object")
    return found
