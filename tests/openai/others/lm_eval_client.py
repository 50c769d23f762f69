"""Runs a task of unmodified lm-eval against URL with TOKENIZER_FOLDER, its arguments; prints the number of texts."""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import lm_eval
from lm_eval.tasks import TaskManager

QUESTIONS = (
    {"q": "The capital of France is", "choices": [" Paris", " Rome", " a lamp"], "answer": 0},
    {"q": "Two and two make", "choices": [" four", " ten", " Rome"], "answer": 0},
    {"q": "Ice is very", "choices": [" cold", " loud", " Rome"], "answer": 0},
)
COMMON = {
    "dataset_path": "json",
    "test_split": "test",
    "doc_to_text": "{{q}}",
}


def task(folder: Path, name: str, **more: object) -> None:
    data = {"data_files": {"test": str(folder / "questions.jsonl")}}
    (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **COMMON, "dataset_kwargs": data, **more}))


with tempfile.TemporaryDirectory() as made:
    folder = Path(made)
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    task(
        folder,
        "texts",
        output_type="generate_until",
        doc_to_target="{{choices[answer]}}",
        generation_kwargs={"until": ["\n"], "max_gen_toks": 8},
        metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    )
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "base_url": f"{sys.argv[1]}/completions",
            "model": "SmolLM2-135M-Instruct",
            "tokenizer": sys.argv[2],
            "max_retries": 1,
        },
        tasks=["texts"],
        task_manager=TaskManager(include_path=made),
        bootstrap_iters=0,
    )
print(len(found["samples"]["texts"]), "texts")
