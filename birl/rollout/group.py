"""n episodes of one task, and their rewards."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from birl.rollout.episode import run_episode, unopened
from birl.rollout.session import Gateway, Limits, Session
from birl.seeds import derive_seed
from birl.types import Agent, Engine, Env, Group, Message, Outcome, SamplingParams, Task, Trajectory
from birl.waits import waiting

if TYPE_CHECKING:
    from birl.rewards.score import Score
    from birl.text.chat import Chat


class Reply(str):
    """Text of the model's last reply, with its token ids."""

    ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, text: str, ids: Sequence[int]) -> "Reply":
        reply = cls(text)
        reply.ids = tuple(ids)
        return reply


#: (task, completions) -> one score for each
Scorer = Callable[[Task, list[Reply]], Awaitable[Sequence["Score"]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """How to roll out a task: everything that is the same for all groups. `score` None: the environment's own reward;
    `gateway`: the model's HTTP endpoint for agents; `saw`: called with every episode that has failed or has its reward,
    an exception of it ends the group; `policies`: seed of a group -> engine of each policy by name, None: one policy
    without a name; `notes`: of those printed once."""

    engine: Engine
    chat: "Chat"
    open_env: Callable[[Task], Env | Agent]
    score: Scorer | None
    limits: Limits | Callable[[Task], Limits]
    seed: int
    gateway: Gateway | None = None
    saw: Callable[[Task, Trajectory], None] = lambda task, trajectory: None
    policies: Callable[[int], Mapping[str, Engine]] | None = None
    notes: set[str] = field(default_factory=set[str])

    async def group(self, index: int, task: Task, n: int, params: SamplingParams, extra: int = 0) -> Group:
        """Run n episodes concurrently and score them. Seeds depend on (seed, index, episode, turn) only, so that a
        resumed run samples the same as an uninterrupted one. Of n + `extra` episodes the first n to finish are kept, in
        order; the others are cancelled. All share one session id, so that engines compute their prompt once."""
        version = self.engine.version
        engine = self.engine if self.policies is None else self.policies(derive_seed(self.seed, index, -1))

        async def one(episode: int) -> Trajectory:
            def seed(turn: int) -> int:
                return derive_seed(self.seed, index, episode, turn)

            session = Session(
                engine,
                self.chat,
                params,
                self.limits(task) if callable(self.limits) else self.limits,
                seed,
                id=str(index),
                name=f"group {index} episode {episode}",
                gateway=self.gateway,
                notes=self.notes,
            )
            try:
                env = self.open_env(task)
            except BaseException as error:  # from foreign code: none of its exceptions may end the run
                ended = unopened(error)
            else:
                ended = await run_episode(env, session)
            if not ended.outcome.scored:
                self.saw(task, ended)
            return ended

        trajectories = await first(n, [one(e) for e in range(n + extra)])
        judged = [i for i, t in enumerate(trajectories) if t.outcome.scored]
        if self.score is not None:
            trajectories = await self._scored(task, trajectories)
        for i in judged:
            self.saw(task, trajectories[i])
        return Group(index=index, task=task, trajectories=tuple(trajectories), start_version=version)

    async def _scored(self, task: Task, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Score the model's last replies with the reward functions. Failed episodes have none."""
        assert self.score is not None
        judged = [i for i, t in enumerate(trajectories) if t.outcome.scored]
        replies = [
            Reply.of(last_reply(t, self.chat).content, t.turns[-1].completion.ids)
            for t in (trajectories[i] for i in judged)
        ]
        result = list(trajectories)
        if not judged:
            return result
        with waiting(f"group {task.id}", "rewards", "reward workers"):
            scores = await self.score(task, replies)
        for i, scored in zip(judged, scores, strict=True):
            before = trajectories[i]
            good = scored.outcome is Outcome.OK
            result[i] = replace(
                before,
                reward=before.reward + scored.value,
                score=before.score + scored.value,
                rewards={name: own + scored.value for name, own in before.rewards.items()},
                parts={**before.parts, **scored.parts},
                extra=scored.extra,
                logged=scored.logged,
                outcome=before.outcome if good else scored.outcome,
                detail=scored.detail or before.detail,
            )
        return result


async def first(n: int, work: Sequence[Coroutine[Any, Any, Trajectory]]) -> list[Trajectory]:
    """The results of the first n to finish, in order. The others are cancelled and have ended when this returns. An
    exception of any cancels all."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(w) for w in work]
        pending = set(tasks)
        until = asyncio.ALL_COMPLETED if n == len(work) else asyncio.FIRST_COMPLETED
        while len(tasks) - len(pending) < n:
            _, pending = await asyncio.wait(pending, return_when=until)
        kept = [t for t in tasks if t.done()][:n]
        for task in pending:
            task.cancel()
    return [t.result() for t in kept]


def last_reply(trajectory: Trajectory, chat: "Chat") -> Message:
    """The model's whole last reply, with its thinking, which reward functions may judge, too."""
    return Message(role="assistant", content=chat.reply_text(trajectory.turns[-1].completion.ids))
