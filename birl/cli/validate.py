"""`birl eval --validate` checks reference answers: it runs each row's gold answer through its environment and rewards,
without a model, and prints the rows that do not score 1.

An environment may define the gold replies by `gold(task)`, a text or message for each turn. Otherwise the row's answer
is the only reply.
"""

import asyncio
import sys
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from birl.config import schema
from birl.data.tasks import Tasks, load_tasks
from birl.envs.calls import called
from birl.envs.open import World, check_world, open_world
from birl.errors import BirlError
from birl.foreign import described, interrupting
from birl.learner.rewards import check_served, make_rewards, started
from birl.parallel.machine import compute_thread
from birl.rollout.group import Rollout, Scorer
from birl.rollout.scorer import scorer
from birl.rollout.session import Tools
from birl.rollout.tasks import limits_in
from birl.types import Agent, Completion, Conversation, Env, Message, Outcome, SamplingParams, Stop, Task, Trajectory
from birl.visible import visible

AT_ONCE = 64  # rows that run concurrently
SHOWN = 20  # failing rows that are printed


@dataclass(slots=True)
class Gold:
    """The gold replies of one row in place of engine and chat template: the tokens of reply n are (n,)."""

    replies: Sequence[Message] = ()
    version: int = 0
    given: int = 0
    asked_more: bool = False

    async def generate(self, prompt_ids: tuple[int, ...], params: SamplingParams, session: str = "") -> Completion:
        if self.given == len(self.replies):
            self.asked_more = True
            raise RuntimeError("no gold reply is left")
        self.given += 1
        return Completion.of((self.given,), (0.0,), (0,), Stop.STOP)

    async def close(self) -> None:
        pass

    def render(self, prompt: Conversation, tools: Tools = ()) -> tuple[int, ...]:
        return (0,)

    def extend(
        self,
        ids: tuple[int, ...],
        reply_tokens: tuple[int, ...],
        messages: tuple[Message, ...],
        tools: Tools = (),
        history: tuple[Message, ...] | None = None,
    ) -> tuple[int, ...]:
        return (*ids, *reply_tokens, 0)

    def append(
        self, ids: tuple[int, ...], reply_tokens: tuple[int, ...], text: str, keep_end: bool = False
    ) -> tuple[int, ...]:
        return (*ids, *reply_tokens, 0)

    def parse(self, tokens: Sequence[int], tools: Tools = (), prompt: Sequence[int] | None = None) -> Message:
        return self.replies[tokens[0] - 1]

    def reply_text(self, tokens: Sequence[int]) -> str:
        return self.replies[tokens[0] - 1].content


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    """A row whose gold answer does not score 1. `where`: its file and row."""

    where: str
    why: str


async def validate(config: schema.Eval, compute: Executor) -> tuple[int, list[Wrong]]:
    """The number of rows, and those that are wrong."""
    check_world(config.env)
    async with AsyncExitStack() as opened:
        rewards = make_rewards(config, compute)
        await check_served(config, rewards)
        starting = await started(rewards, opened)
        world = await open_world(config.env, text)
        opened.push_async_callback(world.close)
        sources = rows(config, world)
        await starting
        bound = asyncio.Semaphore(AT_ONCE)
        score = scorer(rewards)

        async def one(tasks: Tasks, index: int) -> Wrong | None:
            async with bound:
                where = tasks.rows.where(tasks.indices[index])
                why = await problem(config, world, score, tasks, index)
                return Wrong(where=where, why=why.removeprefix(f"{where}: ")) if why else None

        with interrupting(config.env.timeout):
            result = await asyncio.gather(*(one(tasks, i) for tasks in sources for i in range(len(tasks))))
        return len(result), [wrong for wrong in result if wrong is not None]


def rows(config: schema.Eval, world: World) -> list[Tasks]:
    """Rows of data.validation, else the environment's own of both splits."""
    given = partial(load_tasks, config.data, chat=True, hosts=config.model.picture_hosts)
    if config.data.validation:
        return given("validation")
    result = {which: world.rows(which) for which in ("train", "validation")} if world.rows is not None else {}
    if not any(result.values()):
        raise BirlError(
            f"data.validation is empty, and env.kind={world.kind} has no tasks of its own: name a file, as in "
            "data.validation=my.jsonl."
        )
    return [tasks for which, own in result.items() if own for tasks in given(which, given=own)]  # type: ignore[arg-type]


async def problem(config: schema.Eval, world: World, score: Scorer | None, tasks: Tasks, index: int) -> str:
    """What is wrong with a row; empty if its gold answer scores 1."""
    try:
        task = tasks[index]
        env = world.open(task)
    except BirlError as error:
        return str(error)
    except Exception as error:
        return f"cannot be opened: {described(error)}"
    try:
        engine = Gold(replies(env, task))
    except Exception as error:
        await called(env.close)
        return str(error) if isinstance(error, BirlError) else f"has no gold replies: {described(error)}"
    limits = limits_in(world, config.env, tokens=sys.maxsize)
    chat = cast(Any, engine)
    rollout = Rollout(engine=engine, chat=chat, open_env=lambda _: env, score=score, limits=limits, seed=config.seed)
    group = await rollout.group(0, task, 1, SamplingParams(max_tokens=1))
    return verdict(group.trajectories[0], engine, config.validation.threshold or 1.0)


def replies(env: Env | Agent, task: Task) -> list[Message]:
    gold = getattr(env, "gold", None)
    if gold is None and task.answer is None:
        raise BirlError("has no answer, and the environment has no `gold`")
    answers = [task.answer] if gold is None else gold(task)
    return [m if isinstance(m, Message) else Message(role="assistant", content=str(m)) for m in answers]


def verdict(played: Trajectory, gold: Gold, right: float) -> str:
    shown = " | ".join(short(reply) for reply in gold.replies)
    if gold.asked_more:
        return f"continues after the last gold reply (gold: {shown})"
    if played.outcome is not Outcome.OK:
        return f"{played.outcome}: {played.detail or 'the episode was cut by env.max_turns'} (gold: {shown})"
    if played.score < right:
        return f"scores {played.score:g} (gold: {shown})"
    if gold.given < len(gold.replies):
        return f"ends after {gold.given} of {len(gold.replies)} gold replies (gold: {shown})"
    return ""


def short(reply: Message) -> str:
    text = reply.content or " ".join(f"{c.name}({c.arguments})" for c in reply.tool_calls)
    return text if len(text) <= 60 else f"{text[:57]}..."


def text(prompt: Conversation) -> str:
    """A prompt as text, for text environments; without a model there is no chat template."""
    return prompt if isinstance(prompt, str) else "\n".join(m.content for m in prompt)


def run(config: schema.Eval) -> int:
    """Print the result. Returns 0 if all rows are right, else 1."""
    with compute_thread(config.threads) as compute:
        total, wrong = asyncio.run(validate(config, compute))
    print(f"{total - len(wrong)} of {total} rows: the gold answer scores 1.")
    for each in wrong[:SHOWN]:
        print(visible(f"  {each.where}: {each.why}"))
    if len(wrong) > SHOWN:
        print(f"  and {len(wrong) - SHOWN} more")
    return 1 if wrong else 0
