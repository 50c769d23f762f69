"""Counts receipts that another build of the native steps finds right, and forgeries that it finds.

`python -m benchmarks.receipt_counts make FOLDER` starts a fused server of the embedded pair, asks it for receipts of
several kinds, and forges a copy of each with the server's key. `check FOLDER` draws every token of both again, in this
process, and says which library it ran: `--build x86-64-v2` compiles one for other instructions first. `check` needs
neither torch nor the server, so it runs under an emulator too. Nothing is timed.

A claim of another seed or temperature under which the same tokens are drawn is true, so no check can find it; `make`
asks the server for each such claim, and forges one token instead where it answers the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arguments import Parser, positive
from tandem import Client, SamplingParams
from tandem.checkpoints.adapter_files import AdapterChoice
from tandem.comparison.measuring.workloads import built_in_prompts
from tandem.engine.batcher import Batcher
from tandem.engine.loading import load, load_adapters
from tandem.engine.model_config import ModelConfig
from tandem.receipts.checking import Finding, Outcome, digests, overall, signature
from tandem.receipts.digests import prefix_digests
from tandem.receipts.keys import Keys, open_keys, read_keys
from tandem.receipts.receipt import Receipt, Signed, read_signed
from tandem.receipts.run import CheckConfig, PromptFile, checked_by, fitting
from tandem.runners.loading import Execution, Shape
from tandem.runners.native import build
from tandem.runners.native.prebuilt import LEVELS, PACKAGE, file_name

MAIN = Path(__file__).resolve().parents[1] / "main.py"
LENGTH, RED = 1024, "red"
SAMPLINGS = (
    {"sampling": SamplingParams()},
    {"sampling": SamplingParams(temperature=1.0)},
    {"sampling": SamplingParams(temperature=0.8, top_p=0.95, top_k=50, min_p=0.01)},
    {"sampling": SamplingParams(temperature=0.8, repetition_penalty=1.1, presence_penalty=0.2), "logprobs": 2},
    {"sampling": SamplingParams(temperature=0.7), "adapter": RED},
)
FORGERIES = ("one token", "swap", "model", "seed", "temperature", "cut", "adapter")


@dataclass(frozen=True, slots=True)
class Case:
    """A receipt, or a forged one, with its prompt. `kind`: of sampling, or what was forged."""

    kind: str
    prompt: str
    document: str


def write_adapter(folder: Path) -> None:
    """Writes a LoRA adapter of SmolLM2-135M in PEFT's form, of random numbers."""
    from safetensors.numpy import save_file

    chance, tensors = np.random.default_rng(0), {}
    for layer in range(30):
        for name, outputs in (("q_proj", 576), ("v_proj", 192)):
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{path}.lora_A.weight"] = chance.normal(0, 0.05, (4, 576)).astype(np.float32)
            tensors[f"{path}.lora_B.weight"] = chance.normal(0, 0.05, (outputs, 4)).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "bias": "none"}
    modules = {"target_modules": ["q_proj", "v_proj"], "use_dora": False}
    (folder / "adapter_config.json").write_text(json.dumps(config | modules))
    save_file(tensors, folder / "adapter_model.safetensors")


def requests(count: int, most: int, samplings: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields prompts and the options that each is asked with."""
    prompts = built_in_prompts()
    for number in range(count):
        options = dict(samplings[number % len(samplings)])
        text = f"{prompts[number // len(samplings) % len(prompts)].text} ({number})"
        options["sampling"] = replace(options["sampling"], seed=number)
        yield text, {**options, "max_new_tokens": 16 + number * 7 % (most - 15), "receipt": True}


def answers(client: Client, asked: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, str]]:
    """Yields prompts and their receipts."""
    for text, options in asked:
        yield text, client.generate(text, **options).receipt


def forged(kind: str, signed: Signed, other: Receipt | None, revision: str) -> Receipt:
    """Returns the claim that a server with the key makes instead. `other`: the answer of another model."""
    receipt = signed.receipt
    tokens, sampling = list(receipt.token_ids), receipt.asked.sampling
    at = (7 * len(tokens) + receipt.prompt_tokens) % len(tokens)
    if kind == "seed":
        return replace(receipt, asked=replace(receipt.asked, sampling=replace(sampling, seed=sampling.seed + 1)))
    if kind == "temperature":
        warmer = replace(sampling, temperature=sampling.temperature + 0.5)
        return replace(receipt, asked=replace(receipt.asked, sampling=warmer))
    if kind == "adapter":
        return replace(receipt, adapter=None if receipt.adapter else (RED, revision))
    if kind == "cut" and len(tokens) > 1:
        del tokens[-1 - at % (len(tokens) - 1) :]
    elif kind == "model" and other and other.token_ids != receipt.token_ids:
        changed = replace(other, model=receipt.model, prompt_digest=receipt.prompt_digest)
        return replace(changed, digests=prefix_digests(receipt.prompt_digest, other.token_ids))
    elif kind == "swap" and (pairs := [i for i in range(len(tokens) - 1) if tokens[i] != tokens[i + 1]]):
        at = pairs[at % len(pairs)]
        tokens[at : at + 2] = tokens[at + 1], tokens[at]
    else:
        tokens[at] = (tokens[at] + 1) % receipt.model.vocab_size
    kept = replace(receipt, token_ids=tuple(tokens), logprobs=receipt.logprobs[: len(tokens)])
    return replace(kept, digests=prefix_digests(kept.prompt_digest, kept.token_ids))


def true_claim(client: Client, prompt: str, claim: Receipt) -> bool:
    """Whether the server, asked for what is claimed, answers so."""
    asked = claim.asked
    adapter = claim.adapter[0] if claim.adapter else ""
    answer = client.generate(prompt, asked.sampling, max_new_tokens=asked.max_new_tokens, adapter=adapter)
    return answer.token_ids == claim.token_ids


def make(args: argparse.Namespace) -> int:
    folder: Path = args.folder
    folder.mkdir(parents=True, exist_ok=True)
    if not args.model:
        write_adapter(folder / RED)
    others = {case.prompt: case.document for case in read(args.other / "receipts.jsonl")} if args.other else {}
    ready = folder / "ready.json"
    ready.unlink(missing_ok=True)
    shape = ("--batch", "1", "--sequence_length", str(LENGTH), "--weights", args.weights)
    serving = ("fused_target", "--port", "0", "--receipt_keys", str(folder / "keys"), "--ready_file", str(ready))
    models = ("--model", args.model, "--draft", "ngram") if args.model else ("--adapters", f"{RED}={folder / RED}")
    command = [sys.executable, str(MAIN), *serving, *shape, *models]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        while not ready.exists():
            if server.poll() is not None:
                raise SystemExit((folder / "server.log").read_text())
            asyncio.run(asyncio.sleep(0.2))
        keys = open_keys(folder / "keys", 90)
        with Client(f"127.0.0.1:{json.loads(ready.read_text())['port']}") as client:
            asked = list(requests(args.number, args.max_new_tokens, SAMPLINGS[:-1] if args.model else SAMPLINGS))
            with (folder / "receipts.jsonl").open("w") as right, (folder / "forgeries.jsonl").open("w") as wrong:
                for number, (prompt, document) in enumerate(answers(client, asked)):
                    write(right, Case(f"sampling {number % (len(SAMPLINGS) - bool(args.model))}", prompt, document))
                    kind = FORGERIES[number % (len(FORGERIES) - bool(args.model))]
                    write(wrong, forge(client, keys, kind, prompt, read_signed(document), others))
    finally:
        server.terminate()
        server.wait()
    return 0


def forge(client: Client, keys: Keys, kind: str, prompt: str, signed: Signed, others: dict[str, str]) -> Case:
    if signed.receipt.asked.sampling.greedy and kind in ("seed", "temperature"):
        kind = "one token"  # a greedy answer has no seed
    revision = dict(client.model_info().adapters)[RED] if kind == "adapter" else ""
    other = read_signed(others[prompt]).receipt if prompt in others else None
    claim = forged(kind, signed, other, revision)
    if kind in ("seed", "temperature", "adapter", "model") and true_claim(client, prompt, claim):
        kind = "one token"
        claim = forged(kind, signed, None, "")
    if claim.token_ids == signed.receipt.token_ids and claim.asked == signed.receipt.asked and kind != "adapter":
        raise AssertionError(f"{kind}: nothing was forged")
    return Case(kind, prompt, keys.signed(claim, signed.salt).text)


def write(file: Any, case: Case) -> None:
    file.write(json.dumps([case.kind, case.prompt, case.document]) + "\n")
    file.flush()


def read(file: Path) -> list[Case]:
    return [Case(*json.loads(line)) for line in file.read_text().splitlines()]


async def check(args: argparse.Namespace) -> int:
    """Checks both files as `tandem check` does, but loads the model once. Returns 0 if all is as it should be."""
    folder: Path = args.folder
    trusted = read_keys((folder / "keys" / "published.json").read_text())
    execution = Execution(threads=args.threads, recertify=False)
    adapters = () if args.model else (AdapterChoice(RED, str(folder / RED)),)
    models = ModelConfig(execution, Shape(1, LENGTH), args.model, adapters=adapters)
    config = CheckConfig(Path(), PromptFile(text=""), models, own_length=False)
    files = {name: read(folder / f"{name}.jsonl") for name in ("receipts", "forgeries")}
    batcher, wrong = Batcher("check"), 0
    try:
        receipt = read_signed(files["receipts"][0].document).receipt
        loaded = await load(fitting(config, receipt), batcher)
        await load_adapters(models, loaded)
        print(f"library {build.library_path()}; {receipt.model.dtype}, {loaded.engine.arithmetic}", flush=True)

        async def findings(case: Case) -> list[Finding]:
            signed = read_signed(case.document)
            first = [*signature(signed, trusted), digests(signed.receipt)]
            prompt = PromptFile(text=case.prompt)
            return [*first, *await checked_by(loaded, signed, replace(config, prompt=prompt))]

        for name, expected in (("receipts", Outcome.RIGHT), ("forgeries", Outcome.FORGED)):
            counts: Counter[str] = Counter()
            for case in islice(files[name], args.skip, args.skip + args.number):
                found = await findings(case)
                said = next((f"{one.what}: {one.note}" for one in found if one.outcome is overall(found)), "")
                counts[f"{case.kind}: {overall(found).name}"] += 1
                if overall(found) is not expected:
                    wrong += 1
                    print(f"WRONG {name} {case.kind} {case.prompt[-12:]!r}: {overall(found).name} {said}", flush=True)
            print(name, sum(counts.values()), dict(sorted(counts.items())), flush=True)
    finally:
        await batcher.close()
    return 1 if wrong else 0


def in_another_build(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Runs `check` again with a library that is compiled for other instructions."""
    level = next(level for level in LEVELS if level.needs <= frozenset(build.cpu_features().split()))
    package = args.folder / args.build / PACKAGE
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").touch()
    library = package / file_name(level, build.sources_hash())
    if not library.exists():
        flags = [flag.replace("-march=native", f"-march={args.build}") for flag in build.FLAGS]
        build.build(build.find_compiler(), flags, library)
    inner = [word for word in argv if word != "--build" and word != args.build]
    environment = os.environ | {"PYTHONPATH": f"{package.parent}:{MAIN.parent}"}
    return subprocess.run([sys.executable, "-m", "benchmarks.receipt_counts", *inner], env=environment).returncode


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="receipt_counts", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("part", choices=("make", "check"))
    parser.add_argument("folder", type=Path)
    parser.flag("--number", type=positive, default=500, metavar="N", help="receipts, and as many forgeries")
    parser.flag("--skip", type=int, default=0, metavar="N", help="check: of them, the first that are left out")
    parser.flag("--max-new-tokens", type=positive, default=80, metavar="N", help="the most of one (default: 80)")
    parser.flag("--weights", default="auto", help="make: the number format (default: auto, as stored)")
    parser.flag("--other", type=Path, help="make: a folder made in another format, whose answers are passed off")
    parser.flag("--build", help="check: compile for this architecture, like x86-64-v2")
    parser.flag("--model", help="another target, without adapters, which prompt lookup drafts for")
    parser.flag("--threads", type=positive, metavar="N")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    args = parse(given)
    if args.part == "make":
        return make(args)
    return in_another_build(args, given) if args.build else asyncio.run(check(args))


if __name__ == "__main__":
    sys.exit(main())
