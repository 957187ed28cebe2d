"""Agents that know nothing of training are trained: their clients are the real ones, their answers are kept token by
token, and the learner sees the log-probs that the engine had."""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from birl import Trainer
from birl.engine.engine import EmbeddedEngine
from birl.rollout.assemble import samples
from birl.rollout.group import Rollout
from birl.train.command import train
from birl.types import Completion, Group
from tests.text.test_tools import QWEN
from tests.tiny import tiny_model_folder
from tests.train.trainers import small

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "recipes" / "data" / "arithmetic" / "train.jsonl"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with tools and room for long prompts."""
    made = tiny_model_folder(tmp_path_factory.mktemp("agents") / "model", template=QWEN)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16384}))
    return made


class Run:
    """One step of training, and what the engine sampled in it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, says: Callable[[str], str]) -> None:
        self.sampled: list[Completion] = []
        self.groups: list[Group] = []
        generate, group = EmbeddedEngine.generate, Rollout.group

        async def spied(engine: Any, prompt: Any, params: Any, *rest: Any) -> Completion:
            # Tokens are given instead of drawn; they have the model's own log-probs.
            ids = engine.tokenizer(says(engine.tokenizer.decode(prompt)), add_special_tokens=False).input_ids
            found = await generate(engine, prompt, replace(params, forced=(*ids, 2)[: params.max_tokens]), *rest)
            self.sampled.append(found)
            return found

        async def kept(rollout: Any, *args: Any, **keys: Any) -> Group:
            found = await group(rollout, *args, **keys)
            self.groups.append(found)
            return found

        monkeypatch.setattr(EmbeddedEngine, "generate", spied)
        monkeypatch.setattr(Rollout, "group", kept)

    def train(self, model: Path, run: Path, *words: str) -> dict[str, float]:
        own = ("model.max_length=1000", f"data.train={ROWS}", "rollout.prompts=1", "rollout.max_tokens=24", "steps=1")
        own += ("validation.every=0", "validation.at_start=false", f"run={run}", "engine.kv_cache_gb=0.2")
        train(small(model, run, *own, *words))
        (found,) = [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
        return found

    def check(self, metrics: dict[str, float]) -> list[str]:
        """Exact tokens, exact log-probs, a finite step. Returns the trained text of each sample."""
        turns = [turn for g in self.groups for t in g.trajectories for turn in t.turns]
        assert sorted(map(str, self.sampled)) == sorted(str(turn.completion) for turn in turns)
        assert math.isfinite(metrics["loss"]) and metrics["mismatch/mean"] < 1e-5 and metrics["grad_norm"] > 0
        texts = []
        for g in self.groups:
            for t in g.trajectories:
                assert t.outcome.scored, t.detail
                for sample in samples(t, 1.0, 0, 0):
                    texts.append(sample.tokens[sample.mask].tolist())
        assert sorted(i for text in texts for i in text) == sorted(i for c in self.sampled for i in c.ids)
        return texts  # type: ignore[return-value]


def says(*steps: str) -> Callable[[str], str]:
    """One of `steps` for each turn of a conversation. Conversations end with a right and a wrong answer, in turn."""
    ends = itertools.cycle(("45", "46"))

    def say(prompt: str) -> str:
        step = steps[prompt.count("<|im_start|>assistant") - 1]
        return step.replace("ANSWER", next(ends)) if "ANSWER" in step else step

    return say


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_a_function_with_the_openai_client(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, says(call("add", a=4, b=5), "So it is ANSWER."))
    words = (f"env={ROOT}/examples/agent_openai.py:adds", "rollout.max_tokens=90", "data.shuffle=false")
    metrics = run.train(folder, tmp_path / "run", *words)
    assert len(run.check(metrics)) == 4  # each episode is one sample of two turns
    (group,) = run.groups
    assert [len(t.turns) for t in group.trajectories] == [2] * 4
    assert sorted(t.reward for t in group.trajectories) == [0.0, 0.0, 1.0, 1.0]


def test_a_program_with_the_anthropic_client(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, says("Nine times five", "ANSWER."))
    command = f"python {ROOT}/examples/agent_program.py"
    metrics = run.train(folder, tmp_path / "run", "env=program", f"env.command={command}", "rollout.group_size=2",
                        "data.shuffle=false")  # fmt: skip
    assert len(run.check(metrics)) == 2 and len(run.sampled) == 4


def test_tools_of_trl(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def add(a: int, b: int) -> int:
        """Adds.

        Args:
            a: One number.
            b: Another.
        """
        return a + b

    def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [float(a in str(c)) for a, c in zip(answer, completions, strict=True)]

    run = Run(monkeypatch, says(call("add", a=40, b=5), "ANSWER."))
    keys = {"model.max_length": 1000, "model.dtype": "float32", "engine.kv_cache_gb": 0.2, "track.report": False}
    trainer = Trainer(
        str(folder), right, [{"prompt": "What is 40 + 5?", "answer": "45"}], tools=[add], max_tool_calling_iterations=1,
        num_generations=2, batch_size=1, max_steps=1, max_tokens=90, output_dir=str(tmp_path / "run"),
        overrides={**keys, "track.console": "off", "track.tensorboard": False, "threads": 1},
    )  # fmt: skip
    trainer.train()
    assert trainer.config.env.max_turns == 2
    (metrics,) = trainer.metrics
    assert len(run.check(metrics)) == 2 and metrics["reward/tools/calls"] == 1 and metrics["reward/mean"] == 0.5


SMOLAGENTS = """
from smolagents import OpenAIModel, ToolCallingAgent, tool

@tool
def add(a: int, b: int) -> int:
    '''Adds.

    Args:
        a: One number.
        b: Another.
    '''
    return a + b

def agent(task, base_url, api_key):
    model = OpenAIModel(model_id="any", api_base=base_url, api_key=api_key)
    answer = ToolCallingAgent(tools=[add], model=model, max_steps=3, verbosity_level=0).run(task["prompt"])
    return float(str(answer) == task["answer"])
"""


def test_an_agent_of_smolagents_unmodified(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, says(call("add", a=40, b=5), call("final_answer", answer="ANSWER")))
    (tmp_path / "own.py").write_text(SMOLAGENTS)
    metrics = run.train(
        folder, tmp_path / "run", f"env={tmp_path}/own.py:agent", "rollout.group_size=2", "rollout.max_tokens=90",
        "model.max_length=12000", "learner.tokens_per_microbatch=12000", "data.shuffle=false",
    )  # fmt: skip
    run.check(metrics)
    (group,) = run.groups
    assert sorted(t.reward for t in group.trajectories) == [0.0, 1.0]
    assert [len(t.turns) for t in group.trajectories] == [2, 2]


OPENAI_AGENTS = """
import agents
import openai

@agents.function_tool
def add(a: int, b: int) -> int:
    '''Adds.'''
    return a + b

async def agent(task, base_url, api_key, *, way="items"):
    agents.set_tracing_disabled(True)
    own = agents.Agent(name="adder", instructions="Add.", tools=[add])
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    provider = agents.OpenAIProvider(openai_client=client)
    assert type(provider.get_model(None)) is agents.OpenAIResponsesModel
    keys = {"run_config": agents.RunConfig(model_provider=provider), "auto_previous_response_id": way == "ids"}
    if way == "stream":
        result = agents.Runner.run_streamed(own, task["prompt"], **keys)
        kinds = [event.type async for event in result.stream_events()]
        assert "raw_response_event" in kinds
    else:
        result = await agents.Runner.run(own, task["prompt"], **keys)
    return float(result.final_output == task["answer"])
"""


@pytest.mark.parametrize("way", ["items", "ids", "stream"])
def test_an_agent_of_openai_agents_speaks_responses(folder, tmp_path, monkeypatch, way: str) -> None:
    """Its default model class: the items are sent again, or the previous response is cited. Two calls and an answer are
    one sample."""
    if not hasattr(pytest.importorskip("agents"), "OpenAIResponsesModel"):
        pytest.skip("another package of that name")
    run = Run(monkeypatch, says(f"Hm.\n{call('add', a=40, b=5)}", call("add", a=45, b=0), "ANSWER"))
    (tmp_path / "own.py").write_text(OPENAI_AGENTS)
    metrics = run.train(
        folder, tmp_path / "run", f"env={tmp_path}/own.py:agent", f"env.way={way}", "rollout.group_size=2",
        "rollout.max_tokens=90", "data.shuffle=false",
    )  # fmt: skip
    assert len(run.check(metrics)) == 2
    (group,) = run.groups
    assert sorted(t.reward for t in group.trajectories) == [0.0, 1.0]
    assert [len(t.turns) for t in group.trajectories] == [3, 3]


@pytest.mark.parametrize("name", ["agent_openai", "agent_program"])
def test_examples_are_short(name: str) -> None:
    assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) <= 60
