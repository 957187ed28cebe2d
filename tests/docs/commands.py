"""Runs a command of a page as a reader would, but with a tiny model, one step and a few rows."""

import importlib.util
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from birl.cli import main
from birl.errors import INTERRUPTED
from tests.docs.pages import ROOT, jsonl

#: rows of the files that the pages suppose: whatever a command reads of them is there
ROWS = [
    {"prompt": f"What is {i} + 2?", "answer": str(i + 2), "level": i, "response": f"The answer is {i + 2}."}
    | {"chosen": f"It is {i + 2}.", "rejected": "Anna", "margin": i / 2, "good": i % 2 == 0}
    for i in range(8)
]
TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
OTHER_ROWS = {  # by file name
    "chats.jsonl": [{"messages": [*TALK, {"role": "tool", "content": "7"}, TALK[1]]}] * 4,
    "code.jsonl": [{"prompt": "Write add(a, b).", "tests": ["assert add(1, 2) == 3"]}] * 4,
    "books.jsonl": [{"text": "The sum of two numbers."}] * 4,
}

# What makes a training or an evaluation small, unless the command is about that key.
SMALL = ("rollout.prompts=2", "rollout.group_size=2", "rollout.max_tokens=6", "rollout.max_failure_rate=1")
QUIET = ("track.tensorboard=false", "track.report=false", "track.console=off")
STAGES = ("sft", "rm", "dpo")
SHORT = {
    "rl": ("steps=1", *QUIET, *SMALL),
    "eval": ("validation.max_tokens=6",),
    **dict.fromkeys(STAGES, ("steps=1", "batch_size=2", *QUIET)),
}

# what runs write, by the command that wrote it: names in metrics.jsonl and in validation.jsonl
Figures = dict[str, tuple[set[str], set[str]]]
ABOUT = ("step", "time", "version", "weights", "data", "seed", "n")  # of a record, beside its figures
CHOSEN = "rl reward=length reward.length_target=8 data.order=thompson data.order_threshold=0.5"
AHEAD = "rl reward=length reward.length_target=8 rollout.max_staleness=1 engine.kind=birl"


def small(command: str, words: list[str], tiny: Path) -> list[str]:
    """What to append so that a command takes a second: a tiny model, one step, two prompts."""
    files = [w for w in words if w.endswith(".yaml")]
    text = " ".join([*words, *(Path(f).read_text() for f in files)])
    added = [w for w in SHORT[command] if not (w == "steps=1" and "epochs=" in text)] + ["threads=1"]
    added += [] if "data.validation=" not in text and "validation:" not in text else ["data.max_validation_samples=2"]
    # a model of random weights is never right: with dynamic sampling it needs a reward that differs
    added += ["reward.functions=length", "reward.length_target=8"] if "algorithm=dapo" in text else []
    own_model = any(w.startswith("model=") and Path(w.removeprefix("model=")).is_dir() for w in words)
    return added + ([] if own_model else [f"model.path={tiny}"])


def execute(words: list[str], tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *rest = words
    if program == "make":
        assert any(
            re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.MULTILINE) for target in rest
        )
    elif program.endswith("python"):
        assert (ROOT / rest[0]).is_file() or (rest[0] == "-m" and importlib.util.find_spec(rest[1])), words
    elif program == "birl":
        provide_data(rest)
        provide_models(rest, tiny)
        birl(rest, tiny, monkeypatch)
    else:
        assert program in ("tensorboard", "wandb", "pip", "git", "cd", ".", "vllm", "curl"), (
            f"unknown program in {words}"
        )


def provide_data(words: list[str]) -> None:
    """Files that the page only supposes."""
    for name in re.findall(r"[\w.-]+\.(?:jsonl|csv)(?=[\],\s]|$)", " ".join(words)):
        if not Path(name).exists() and f"/{name}" not in " ".join(words):
            csv = "prompt,answer\n" + "".join(f"{row['prompt']},{row['answer']}\n" for row in ROWS)
            Path(name).write_text(csv if name.endswith(".csv") else jsonl(OTHER_ROWS.get(name, ROWS)))


def provide_models(words: list[str], tiny: Path) -> None:
    """Models that the page only supposes."""
    for key, _, value in (word.partition("=") for word in words):
        if key in ("algorithm.teacher", "distill.teacher", "critic.path") and not Path(value).exists():
            Path(value).symlink_to(tiny)


def birl(words: list[str], tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, *rest = words
    monkeypatch.setattr("builtins.input", end_of_input)
    if command in SHORT and not {"--help", "--print-config"} & set(rest):
        if needs_network(rest) or ("env=gem" in rest and sys.version_info >= (3, 12)):  # gem-llm is for 3.11
            rest = [*rest, "--print-config"]
        else:  # a job of --multirun is a process of its own: too slow to start here
            rest = [*rest, *small(command, rest, tiny), *(["--print-config"] if "--multirun" in rest else [])]
        if command != "eval" and not any(word.startswith("run=") for word in rest):
            rest.append("run=runs/here")
    elif command == "plan" and not {"--simulate", "--cluster"} & set(rest):
        rest = [*rest, f"model.path={tiny}"]
    elif command in ("serve", "tinker") and "--help" not in rest:  # tests/server/ starts them
        rest = [*rest, "--print-config"]
    elif command == "chat" and not (rest and "=" not in rest[0]):
        rest = [str(tiny), *rest]
    elif command == "view":  # tests/view starts one; it ends by Ctrl-C alone
        monkeypatch.setattr("birl.view.command.server", lambda *_: SimpleNamespace(run=lambda listeners: None))
        assert main([command, *rest, "--no-browser"]) == INTERRUPTED, words
        return
    assert main([command, *rest]) == 0, words
    shutil.rmtree("runs/here", ignore_errors=True)


def needs_network(words: list[str]) -> bool:
    """Whether the data or the model is a hub name such as openai/gsm8k, or a server judges or teaches."""
    if any("://" in w for w in words if w.startswith(("reward.", "algorithm."))):
        return True
    places = [w.partition("=")[2] for w in words if w.startswith(("data.train=", "data.validation=", "model"))]
    values = [value for place in places for value in re.split(r"[\[\],@]", place)]
    return any(re.fullmatch(r"[\w-]+/[\w.-]+", v) and not Path(v).exists() and not Path(v).suffix for v in values)


def end_of_input(prompt: str = "") -> str:
    raise EOFError
