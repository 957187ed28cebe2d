"""Runs in .venv-agents: lm-evaluation-harness scores a task of choices and one of whole texts, by `birl serve` and by
the model itself, without the hub. Gives the log-likelihoods of each as a line of JSON.

    python -m tests.server.lm_eval_process FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

from tests.server.running import running
from tests.tiny import tiny_model_folder

ROWS = [
    {"question": "What is 3 + 4?", "choices": [" 7", " 8", " I do not know"], "answer": 0},
    {"question": "Anna has 2 apples.", "choices": [" Good.", " 2", " Anna has apples."], "answer": 2},
]


def tasks(rows: Path) -> list[dict[str, Any]]:
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(rows)}}, "test_split": "test"}
    choices = {"doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": "answer"}
    texts = {"doc_to_text": "", "doc_to_target": "{{question}}"}
    return [
        {"task": "choices", **data, "output_type": "multiple_choice", **choices},
        {"task": "texts", **data, "output_type": "loglikelihood_rolling", **texts},
    ]


def scored(rows: Path, kind: str, /, **args: Any) -> dict[str, Any]:
    """Of each task, the log-likelihood of every request, and whether it is the greedy one where that is told."""
    own = TaskManager(include_defaults=False)
    found: Any = lm_eval.simple_evaluate(kind, args, tasks(rows), task_manager=own, batch_size=2, bootstrap_iters=0)
    return {name: [sample["resps"] for sample in samples] for name, samples in found["samples"].items()}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    rows, path = folder / "rows.jsonl", tiny_model_folder(folder / "model")
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    told = {"itself": scored(rows, "hf", pretrained=str(path), dtype="float32", device="cpu", max_length=500)}
    with running(path, model={"dtype": "float32"}) as server:
        args = {"base_url": f"{server.url}/v1/completions", "model": "any", "max_length": 500}
        told["huggingface"] = scored(
            rows, "local-completions", tokenizer=str(path), **args, tokenizer_backend="huggingface"
        )
        told["remote"] = scored(rows, "local-completions", **args, tokenizer_backend="remote")
    print("TOLD", json.dumps(told), flush=True)
