"""Rollouts as a run writes them, without a run."""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from birl.track.log import encode
from tests.tiny import CHATML, tiny_tokenizer

QUESTION = "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n"


def record(
    step: int = 1, group: int = 0, episode: int = 0, text: str = "The answer is 7.<|im_end|>", **more: Any
) -> Any:
    """A line of rollouts.jsonl; with `said` tokens that the model said, else 5."""
    said = more.pop("said", 5)
    found = {
        **{"step": step, "group": group, "episode": episode, "task": f"train.jsonl:{group}", "source": "arithmetic"},
        **{"answer": "7", "outcome": "ok", "detail": "", "reward": 1.0, "score": 1.0, "parts": {"math": 1.0}},
        **{"advantage": 0.5, "text": text, "turns": [], "rewards": {}},
        "samples": [
            {
                "tokens": [1, 9, 4, *[45] * said],
                "mask": [0, 0, 0, *[1] * said],
                "logprobs": [0.0, 0.0, 0.0, *[-0.5] * said],
                "versions": [-1, -1, -1, *[step - 1] * said],
            }
        ],
    }
    return found | more


def write(path: Path, records: Iterable[Any], mode: str = "wb") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode) as file:
        file.writelines(encode(one) for one in records)
    return path


def spoken(parts: list[tuple[str, bool]], **more: Any) -> Any:
    """A record whose tokens are those of texts; True: the model said it."""
    tokenizer = tiny_tokenizer()
    tokens: list[int] = []
    mask: list[int] = []
    for text, own in parts:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        tokens += ids
        mask += [int(own)] * len(ids)
    rng = random.Random(0)
    sample = {
        "tokens": tokens,
        "mask": mask,
        "logprobs": [-3 * rng.random() ** 3 if m else 0.0 for m in mask],
        "versions": [2 + n // 20 % 2 if m else -1 for n, m in enumerate(mask)],
        "gaps": [0.3 * rng.gauss(0, 1) ** 3 for _ in range(sum(mask))],
        "entropies": [3 * rng.random() for _ in range(sum(mask))],
    }
    text = "".join(text for text, own in parts if own)
    return record(text=text, samples=[sample], **more)


def run_folder(folder: Path, records: Iterable[Any]) -> Path:
    """A run that `birl view` takes for one, with the tokenizer that `spoken` uses."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "metrics.jsonl").write_text('{"step":1,"reward/mean":0.5}\n')
    (folder / "config.yaml").write_text("{}\n")
    tiny_tokenizer(template=CHATML).save_pretrained(folder / "model")
    write(folder / "rollouts.jsonl", records)
    return folder
