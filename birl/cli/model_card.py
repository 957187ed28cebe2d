"""Model card for the hub: base model and data, training, and evaluation with intervals.

Everything is read from the run's files. Local data and models are shown by name, without folders.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from birl.algorithms.pass_at_k import wilson
from birl.algorithms.uncertainty import interval
from birl.regular import read_json
from birl.rollout.evaluate import Baseline, scores
from birl.track.algorithm import algorithm
from birl.track.progress import is_share, stored, validation_score
from birl.track.units import count

DEFAULT = "HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0"  # hub id and licence of `smollm2`
SHOWN = (
    "optimizer.lr",
    "rollout.prompts",
    "rollout.group_size",
    "rollout.max_tokens",
    "batch_size",
    "lora.rank",
    "seed",
)
ROWS = 12  # of the curve


def model_card(run: Path, step: int, name: str, licence: str = "", adapter: bool = False) -> str:
    """Markdown with the hub's metadata. `licence`: the hub's id; empty: the base model's, if known."""
    config = read_json(run / "config.json")
    path = str(config["model.path"])
    base, known = base_of(path)
    shared = path == "smollm2" or (base == path and not Path(path).expanduser().exists())  # the hub accepts only these
    licence = licence or known
    method = algorithm(config)
    judges = "ranking.centering" in config
    head: dict[str, Any] = {"base_model": base} if shared else {}
    head |= {"license": licence} if licence else {}
    head |= {"library_name": "peft" if adapter else "transformers"}
    head |= {"pipeline_tag": "text-classification" if judges else "text-generation"}
    head |= {"tags": ["birl", method.rstrip("*"), *(["lora"] if config.get("lora.rank") else [])]}
    facts = {
        "base model": f"{base}; licence: {licence or 'not known to birl: see the base model'}",
        "trained by": f"{method.rstrip('*')}{' with other settings' * method.endswith('*')}, {step} steps",
        "data": ", ".join(map(shown, config["data.train"])) or shown(str(config.get("env.kind", ""))),
        "rewards": ", ".join(map(shown, config.get("reward.functions") or ())),
        "settings": ", ".join(f"`{key}={config[key]}`" for key in SHOWN if config.get(key)),
        "tokens": trained(stored(run / "metrics.jsonl"), step),
    }
    validations = [v for v in stored(run / "validation.jsonl") if v["step"] <= step]
    lines = ["---", *yaml.safe_dump(head, sort_keys=False, allow_unicode=True).splitlines(), "---"]
    lines += ["", f"# {name.rpartition('/')[2]}", "", "Trained with [birl](https://pypi.org/project/birl).", ""]
    lines += ["| | |", "|---|---|", *(f"| {key} | {cell(value)} |" for key, value in facts.items() if value)]
    lines += [*evaluation(validations, step), *curve(validations), *usage(name, base, adapter, judges)]
    return "\n".join(lines) + "\n"


def base_of(path: str) -> tuple[str, str]:
    """Hub id of a base model, or the last part of a folder; and its licence, if the hub knows it."""
    if path == "smollm2":
        return DEFAULT
    if Path(path).expanduser().exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        return shown(path), ""
    from huggingface_hub import HfApi

    try:
        about = HfApi().model_info(path).card_data
    except Exception:  # no network, or the model was removed
        return path, ""
    return path, str(about.license) if about and about.license else ""


def shown(name: str) -> str:
    """Name of a file, folder or data set without its local folder."""
    local = Path(name.partition(":")[0]).expanduser()
    return Path(name).name if local.is_absolute() or local.exists() else name


def trained(steps: Sequence[Mapping[str, Any]], last: int) -> str:
    total = sum(record.get("tokens/learned", 0) or 0 for record in steps if record["step"] <= last)
    return f"{count(total)} trained on" if total else ""


def evaluation(validations: Sequence[Mapping[str, Any]], step: int) -> list[str]:
    """Score of this checkpoint with its interval, and its difference from the first one's, paired by prompt. For scores
    that are not 0 or 1, and for several answers to a prompt, the interval is of the answers that the run stored."""
    if not validations or validations[-1]["step"] != step or (value := validation_score(validations[-1])) is None:
        return ["", "## Evaluation", "", "This checkpoint was not validated."]
    first, last = validations[0], validations[-1]
    n, kept = int(last.get("validation/all/n", 0)), scores(last.get("samples") or [])
    text = f"Validation {value:.3f}" + (f" over {n} held-out prompts" if n else "")
    if n and is_share(last) and last.get("n") == 1:
        text += ", 95 %: {:.3f} to {:.3f}".format(*wilson(value * n, n))
    elif kept:
        low, high = interval(list(kept.values()))
        text += f"; of {len(kept)} kept answers {fmean(kept.values()):.3f}, 95 %: {low:.3f} to {high:.3f}"
    lines = [f"{text}."]
    before = Baseline(
        path="the first validation", data=str(first.get("data")), scores=scores(first.get("samples") or [])
    )
    if first is not last and first.get("data") == last.get("data") and kept.keys() & before.scores.keys():
        lines += ["", f"Against step {first['step']}, on the prompts whose answers the run kept, paired:", ""]
        lines += [f"- {difference}" for difference in before.against(before.data, last["samples"])]
    return ["", "## Evaluation", "", *lines]


def curve(validations: Sequence[Mapping[str, Any]]) -> list[str]:
    points = [(v["step"], value) for v in validations if (value := validation_score(v)) is not None]
    if len(points) < 2:
        return []
    chosen = (
        sorted({round(n * (len(points) - 1) / (ROWS - 1)) for n in range(ROWS)})
        if len(points) > ROWS
        else range(len(points))
    )
    return [
        "",
        "## Curve",
        "",
        "| step | validation |",
        "|---|---|",
        *(f"| {points[n][0]} | {points[n][1]:.3f} |" for n in chosen),
    ]


def usage(name: str, base: str, adapter: bool, judges: bool) -> list[str]:
    kind = "AutoModelForSequenceClassification" if judges else "AutoModelForCausalLM"
    whole, load = json.dumps(base if adapter else name), f"{kind}.from_pretrained"
    model = f"PeftModel.from_pretrained({load}({whole}), {json.dumps(name)})" if adapter else f"{load}({whole})"
    lines = [
        *(["from peft import PeftModel"] if adapter else []),
        f"from transformers import {kind}, AutoTokenizer",
        "",
    ]
    lines += [f"tokenizer = AutoTokenizer.from_pretrained({whole})", f"model = {model}"]
    return ["", "## Use", "", "```python", *lines, "```"]


def cell(text: str) -> str:
    """Escape text for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
