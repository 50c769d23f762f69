"""Each known error is recognised in a real message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.cli import main
from tandem.workshops.planning.known_errors import LINE_BYTES, errors_in, read_log

MESSAGES = {
    "compiler-killed": "RuntimeError: neuronx-cc failed with -9",
    "compiler-70": "RuntimeError: neuronx-cc failed with 70",
    "compiler-unhandled": (
        "[INTERNAL_ERROR] [NCC_INLA001] Unhandled exception with message: [json.exception.type_error.302] "
        "type must be boolean, but is null"
    ),
    "tile-too-large": (
        "USER 5521 [neuronxcc.driver.CommandDriver]: [NLA001]  Unhandled exception with message: Allocated "
        "memory out of bound {maximum.11_VN_0}@SB<0,185856>(756257x10376)"
    ),
    "too-many-instructions": "[NCC_EBVF030] The number of instructions generated exceeds the limit.",
    "compiler-device-memory": (
        "[NCC_EOOM001] The combined memory needed for the model's activation tensors exceeds the "
        "high-bandwidth memory limit."
    ),
    "logical-cores": "[NCC_EARG001] Unsupported Logical Neuron Core (LNC) configuration.",
    "device-memory": (
        "2024-Oct-15 18:01:17.728750  3882:3882  ERROR  TDRV:dmem_alloc_internal    Failed to alloc DEVICE "
        "memory: 180355072"
    ),
    "cores-held": (
        "ERROR  NRT:nrt_allocate_neuron_cores   Logical Neuron Core(s) not available - Requested:2 Available:0"
    ),
    "no-device": "ERROR  TDRV:tdrv_get_dev_info                       No neuron device available",
    "no-runtime-library": "OSError: libnrt.so.1: cannot open shared object file: No such file or directory",
    "neff-version": "nrt_load failed: NRT_UNSUPPORTED_NEFF_VERSION (10)",
    "topology": (
        "273:478   ERROR   NRT:nrt_load_collectives                    Unsupported topology. Supported number"
        " of Neuron Cores is 1, 2, 8, 16 or a multiple of 32."
    ),
    "numerical-error": "RuntimeError: Failed to execute the model status=1003 message=Numerical Error",
    "draft-scales": "RuntimeError: Cannot find draft_model.layers.1.mlp.gate_proj.scale in state_dict",
    "placeholder": (
        "tandem: torch-neuronx 1.0 is a placeholder from PyPI; install AWS's own from "
        "https://pip.repos.neuron.amazonaws.com"
    ),
    "two-stacks": (
        "torch-neuronx 2.9.0.2.12.22436 is the XLA package; TorchNeuron (SDK 2.33 or newer) needs an "
        "environment of its own"
    ),
    "claim-source": (
        'Error creating: Pod "demo-dra-tz69j" is invalid: spec.resourceClaims[0]: Invalid value: '
        "core.PodResourceClaim{}: must specify one of: `resourceClaimName`, `resourceClaimTemplateName`"
    ),
    "claim-not-met": "0/1 nodes are available: 1 cannot allocate all claims. still not schedulable",
    "device-plugin": "0/3 nodes are available: 3 Insufficient aws.amazon.com/neuron.",
}
"""Lines as logs of others have them, shortened (the addresses are in the table), and Tandem's own."""
LINES = list(MESSAGES.items())


@pytest.mark.parametrize(("name", "line"), LINES, ids=[line[:60] for _, line in LINES])
def test_a_message_is_recognised_as_one_error(name: str, line: str) -> None:
    assert [error.name for error in errors_in(line)] == [name]


def test_a_log_is_read_line_by_line_and_each_error_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "server.log"
    log.write_bytes(b"\xff starting\n" + f"{LINES[0][1]}\nwell\n{LINES[0][1]}\n".encode() + LINES[-1][1].encode())
    found = list(read_log(log))
    assert [(error.name, line) for line, _, error in found] == [("compiler-killed", 2), ("device-plugin", 5)]
    assert main.main(["--role", "doctor", "--log", str(log)]) == 0
    shown = capsys.readouterr().out
    assert f"{log}:2: RuntimeError: neuronx-cc failed with -9" in shown
    assert all(text in shown for *_, error in found for text in (error.cause, error.command))
    assert main.main(["--role", "doctor", "--json", "--log", str(log)]) == 0
    assert [one["error"]["name"] for one in json.loads(capsys.readouterr().out)] == ["compiler-killed", "device-plugin"]


def test_a_log_without_line_ends_is_read_in_pieces(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("x" * (LINE_BYTES + 7) + LINES[0][1], "utf-8")
    assert [error.name for *_, error in read_log(log)] == ["compiler-killed"]


def test_a_log_without_known_errors_is_exit_code_1_and_one_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "server.log"
    log.write_text("serving\n", "utf-8")
    assert main.main(["--role", "doctor", "--log", str(log)]) == 1
    assert "none of the" in capsys.readouterr().out
    assert main.main(["--role", "doctor", "--log", str(tmp_path / "absent.log")]) == 2
    assert "log: " in (said := capsys.readouterr().err) and "absent.log cannot be read: No such file" in said
