"""A `Bench` runs tiny runs in a folder with all that they name, and notes what they do (`Seen`)."""

import hashlib
import io
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch

from birl.cli import evaluation
from birl.config.load import load_with_choices
from birl.config.schema import RL, Eval
from birl.engine.runner import Runner
from birl.errors import BirlError
from birl.learner import checkpoint, step_folders
from birl.learner.learner import Learner
from birl.named import Given
from birl.rollout.group import Rollout
from birl.track.sink import KINDS, Kind, Start
from birl.train import build
from birl.train.command import train
from birl.types import Group
from tests.config.witnesses import Seen
from tests.tiny import tiny_model_folder, tiny_moe_folder

ANY = object()
SERVER = Path(__file__).parents[1] / "envs/mcp_server.py"
TRAINING = """
model.path=model model.dtype=float32 data.train=a.jsonl reward.functions=given:letters
rollout.prompts=2 rollout.group_size=4 rollout.max_tokens=8 optimizer.lr=0.01 engine.kv_cache_gb=0.01
checkpoint.every=0 steps=1 threads=1 track.console=off track.tensorboard=false track.report=false
"""
EVALUATION = """
model.path=model model.dtype=float32 data.validation=b.jsonl reward.functions=given:letters
validation.max_tokens=8 engine.kv_cache_gb=0.01 threads=1
"""
FILE = """
import os, time

def letters(completions, **_): return [sum(map(ord, c)) % 7 for c in completions]
def process(completions, **_): time.sleep(0.1); return [float(os.getpid())] * len(completions)
"""


CUSTOM = """
from birl.algorithms.surrogates import reinforce

def advantage(rewards, group, *, factor=1.0): return (rewards - rewards.mean()) * factor
def loss(logp, old_logp, advantages, sample, *, beta=1.0): return reinforce(logp, old_logp, beta * advantages, sample)
"""


WORLDS = """
from dataclasses import dataclass
from birl.types import Feedback, Message

class Thrice:
    @dataclass
    class Config:
        word: str = "go"
    def __init__(self, task, config):
        self.word, self.turn = config.word, 0
    async def start(self):
        return (Message(role="user", content=self.word),)
    async def step(self, reply):
        self.turn += 1
        reward = float(sum(map(ord, reply.content)) % 7)
        return Feedback(messages=(Message(role="user", content="on"),), reward=reward, done=self.turn == 3)
    async def close(self): pass

def hot(base_url):
    import json, urllib.request
    asked = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 40.0}
    urllib.request.urlopen(base_url + "/chat/completions", json.dumps(asked).encode()).read()
    return 1.0
"""


def letters() -> Callable[..., list[float]]:
    return lambda completions, **_: [float(sum(map(ord, c)) % 7) for c in completions]


def shortness() -> Callable[..., list[float]]:
    return lambda completions, **_: [-float(len(c)) for c in completions]


def constant() -> Callable[..., list[float]]:
    return lambda completions, **_: [1.0] * len(completions)


def sometimes_constant() -> Callable[..., list[float]]:
    """Prompts with an even answer have groups without signal."""
    return lambda completions, answer, **_: [float(i * (int(a) % 2)) for i, a in enumerate(answer[: len(completions)])]


def first_fails() -> Callable[..., list[float]]:
    return lambda completions, **_: [math.nan, *(float(sum(map(ord, c)) % 7) for c in completions[1:])]


def even() -> Callable[..., list[float]]:
    return lambda completions, **_: [float(sum(map(ord, c)) % 2) for c in completions]


def slow() -> Callable[..., list[float]]:
    return lambda completions, **_: time.sleep(0.2) or [1.0] * len(completions)


def falling() -> Callable[..., list[float]]:
    """Each call is worth less than the one before."""
    calls = iter(range(1000))

    def function(completions: list[str], **_: object) -> list[float]:
        call = next(calls)
        return [i - 10.0 * call for i in range(len(completions))]

    return function


GIVEN = {f.__name__: f for f in (letters, even, shortness, constant, sometimes_constant, first_fails, slow, falling)}


@dataclass(frozen=True)
class Case:
    """`to`: the key's other value. `see`: the witness, `becomes`: what it shows then. `under`: settings of both runs.
    `refused`: instead of a witness, what the error of the changed run says."""

    to: str
    see: Callable[[Seen], Any] | None = None
    becomes: Any = ANY
    under: str = ""
    refused: str = ""


class Bench:
    """Runs settings once and remembers what was seen."""

    def __init__(self) -> None:
        self.known: dict[tuple[type, str, int], Seen] = {}
        self.runs = 0

    def seen(self, schema: type, settings: str, repetition: int = 0) -> Seen:
        key = (schema, settings, repetition)
        if key not in self.known:
            self.known[key] = self.observe(schema, settings)
        return self.known[key]

    def observe(self, schema: type, settings: str) -> Seen:
        self.runs += 1
        words = (TRAINING + f"run=run{self.runs} " if schema is RL else EVALUATION) + settings
        by_key = dict(word.partition("=")[::2] for word in words.split())  # pyright: ignore
        spaced = {"Be_brief.": "Be brief."}
        config, choices = load_with_choices(schema, [f"{k}={spaced.get(v, v)}" for k, v in by_key.items()])  # pyright: ignore
        seen = Seen(config=config)
        with ExitStack() as stack:
            out = stack.enter_context(redirect_stdout(io.StringIO()))
            spies(seen, stack)
            if schema is RL:
                seen.summary = train(config, choices, given=Given(rewards=functions(config)))
                seen.run = Path(seen.summary["run"])
                seen.weights = digest(seen.run)
            else:
                evaluation.run(config)
        seen.printed = out.getvalue()
        return seen


def functions(config: Any) -> list[Any]:
    names = [name.removeprefix("given:") for name in config.reward.functions]
    return [GIVEN[name]() if name in GIVEN else name for name in names]


def digest(run: Path) -> str:
    newest = step_folders.latest(run / "checkpoints")
    assert newest is not None
    tensors = checkpoint.read_tensors(newest, "model.")
    return hashlib.sha256(b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))).hexdigest()


def spies(seen: Seen, stack: ExitStack) -> None:
    """Note what goes through the run's own objects; nothing of it is changed."""

    def spy(owner: Any, name: str, note: Callable[..., None]) -> None:
        original = getattr(owner, name)

        def called(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            note(result, *args)
            return result

        stack.enter_context(patch.object(owner, name, called))

    def note_passes(*_: Any) -> None:
        seen.passes += 1

    def note_batch(result: Any, runner: Any, plan: Any) -> None:
        seen.decoded_at_once = max(seen.decoded_at_once, sum(len(w.samplers) for w in plan))
        seen.guesses += sum(len(w.drafts) for w in plan)
        seen.threads = torch.get_num_threads()

    spy(Learner, "forward_backward", note_passes)
    spy(Runner, "run", note_batch)
    training = build.training

    async def built(*args: Any) -> Any:
        seen.parts = await training(*args)
        return seen.parts

    stack.enter_context(patch.object(build, "training", built))

    guard = build.Watchdog

    def watchdog(limit: float, *args: Any) -> Any:
        seen.watchdog = limit
        return guard(limit, *args)

    stack.enter_context(patch.object(build, "Watchdog", watchdog))
    play, measure, make_rewards = Rollout.group, evaluation.evaluation, evaluation.make_rewards

    async def group(self: Rollout, *args: Any, **keys: Any) -> Group:
        found = await play(self, *args, **keys)
        seen.everything.append((self.seed, found))
        return found

    async def opened(*args: Any) -> Any:
        seen.parts = await measure(*args)
        return seen.parts

    stack.enter_context(patch.object(Rollout, "group", group))
    stack.enter_context(patch.object(evaluation, "evaluation", opened))
    if isinstance(seen.config, Eval):  # has no Python way in; named functions would need a worker process each time
        stack.enter_context(
            patch.object(evaluation, "make_rewards", lambda *args: make_rewards(*args, functions(seen.config)))  # pyright: ignore
        )


class NotedTracker:
    """Instead of a tracker's package: notes in the run folder that it was asked for."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def start(self, start: Start) -> None:
        (start.run / f"{self.kind.name}.asked").write_text(start.mode)

    def log(self, step: int, figures: Any) -> None: ...
    def samples(self, step: int, samples: Any) -> None: ...
    def close(self, summary: Any, failed: bool) -> None: ...


def trackers_installed(patches: pytest.MonkeyPatch) -> None:
    patches.setattr(Kind, "make", lambda kind: NotedTracker(kind))
    for name in KINDS:
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        patches.setitem(sys.modules, name, module)


@contextmanager
def opened_bench(tiny: Path, folder: Path) -> Iterator[Bench]:
    """`tiny`: the model's folder."""
    with pytest.MonkeyPatch.context() as patches:
        patches.chdir(folder)
        trackers_installed(patches)
        patches.setenv("WORLD_SIZE", "1")  # as a launcher that has started nobody else
        Path("model").symlink_to(tiny)
        tiny_model_folder("other", seed=1)
        tiny_moe_folder("moe")
        tiny_model_folder("plain", heads=4, kv_heads=2)  # not on birl's kernels
        Path("shout.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}!!!")
        Path("tools.jinja").write_text(
            "{% for t in tools or [] %}{{ t.function.description }}{% endfor %}"
            "{% for m in messages %}{{ m['content'] }}"
            "{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}{% endfor %}"
        )
        Path("server.py").write_text(f"#!{sys.executable}\n" + SERVER.read_text())
        Path("server.py").chmod(0o755)
        patches.setenv("BIRL_TEST_USER", "somebody")
        Path("rewards.py").write_text(FILE)
        Path("custom.py").write_text(CUSTOM)
        Path("worlds.py").write_text(WORLDS)
        named = {"other": "seven", "teacher": "eight"}
        plain = [{"prompt": f"What is {i} + 2?", "answer": str(i + 2), **named} for i in range(20)]
        write("a.jsonl", plain[:6])
        write("b.jsonl", plain[10:13])
        write("long.jsonl", [{**row, "prompt": f"{row['prompt']} {'why? ' * 40}"} for row in plain[:2]] + plain[2:8])
        write("splits/train.jsonl", [{"prompt": f"Is {i} split?", "answer": "0"} for i in range(4)])
        write("splits/test.jsonl", [{"prompt": f"Was {i} split?", "answer": "1"} for i in range(3)])
        write("subsets/one.jsonl", [{"prompt": f"Is {i} one?", "answer": "one"} for i in range(4)])
        write("subsets/other.jsonl", [{"prompt": f"Is {i} other?", "answer": "other"} for i in range(4)])
        write_subsets()
        bench = Bench()
        bench.observe(RL, "run=earlier")
        yield bench


def write(name: str, rows: list[dict[str, Any]]) -> None:
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_subsets() -> None:
    subsets = "\n".join(
        f"- config_name: {name}\n  data_files: {file}\n  default: {str(name == 'first').lower()}"
        for name, file in (("first", "one.jsonl"), ("second", "other.jsonl"))
    )
    Path("subsets/README.md").write_text(f"---\nconfigs:\n{subsets}\n---\n")


def prove(bench: Bench, schema: type, key: str, case: Case | None) -> None:
    assert case is not None, f"{key} has no case: say here which effect it has, or remove it"
    changed = f"{case.under} {key}={case.to.replace(' ', '_')}"
    before = bench.seen(schema, case.under)
    if case.refused:
        with pytest.raises(BirlError, match=case.refused):
            bench.observe(schema, changed)
        return
    assert case.see is not None
    shown = case.see(before)
    assert case.see(bench.seen(schema, case.under, repetition=1)) == shown, "two equal runs differ"
    after = case.see(bench.observe(schema, changed))
    assert after != shown
    assert case.becomes is ANY or after == case.becomes
