"""Configuration -> reward functions beside the environment's reward."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from typing import Any

from birl.config import schema
from birl.config.decided import at_once, reward_timeout, teachers_of
from birl.data.messages import messages_of
from birl.data.pack import pack
from birl.data.sequences import Encoder, Tokens, Unfit, scored
from birl.errors import BirlError
from birl.hub import addressed
from birl.learner.export import resolved
from birl.learner.learner import Learner
from birl.learner.policy import DTYPES
from birl.learner.token_figures import by_sample
from birl.models.device import choose
from birl.models.load import context_limit, end_ids, load_reward_model, load_tokenizer
from birl.models.verify import verify
from birl.rewards.questions import settings
from birl.rewards.score import Rewards
from birl.text.chat import Chat


class RewardModel:
    """A reward function: (completions, prompts) -> scores. It is a frozen learner with a score head that computes on
    the thread of engine and learner, packed, each prompt once for all its answers. Raises `BirlError` if the folder
    has no reward model."""

    __name__ = "model"
    reads_text = True

    def __init__(self, path: str, config: schema.Model, compute: Executor, tokens: int = 8192) -> None:
        folder = resolved(path, "reward.model")
        model = load_reward_model(folder).to(choose(config.device))
        verify(model, DTYPES[config.dtype])
        tokenizer = load_tokenizer(folder)
        self.chat = Chat(tokenizer)
        self.chat.end_ids = end_ids(model, tokenizer)
        self.limit = context_limit(model)
        self.tokens = max(tokens, self.limit + 1)
        self.learner = Learner(model, dtype=DTYPES[config.dtype], trainable=False)
        self.compute = compute

    async def __call__(self, completions: list[str], prompts: list[Any]) -> list[float]:
        return await asyncio.get_running_loop().run_in_executor(self.compute, self.scores, completions, prompts)

    def scores(self, completions: Sequence[str], prompts: Sequence[Any]) -> list[float]:
        """Return one score for each completion. Raises `BirlError` for one longer than the model's context."""
        pairs = enumerate(zip(prompts, completions, strict=True))
        samples = [scored(self.read(p, c), self.group(prompts, i)) for i, (p, c) in pairs]
        batches = pack(samples, [0.0] * len(samples), self.tokens)
        result = by_sample(batches, self.learner.ranks.each(batches, self.learner.forward), len(samples))
        return [each.item() for each in result]

    def read(self, prompt: Any, completion: str) -> Tokens:
        asked = prompt if isinstance(prompt, str) else messages_of(prompt, "reward model", "prompt")
        encoder = Encoder(self.chat, schema.Files(), self.limit)
        try:
            return encoder.tokens(encoder.answered(asked, completion, ["assistant"]), "reward model", ["assistant"])
        except Unfit as error:
            raise BirlError(
                f"an answer with its prompt has more than the {self.limit} tokens that the reward model reads"
            ) from error

    @staticmethod
    def group(prompts: Sequence[Any], index: int) -> int:
        """Group of a completion: neighbours with the same prompt share one."""
        while index > 0 and prompts[index] == prompts[index - 1]:
            index -= 1
        return index


def make_rewards(
    config: schema.RL | schema.Eval, compute: Executor, given: Sequence[Callable[..., Any] | str] = ()
) -> Rewards | None:
    """Return the reward functions; None if only the environment rewards. A reward model is loaded here; one with an
    address is called by a worker."""
    keys, timeout = config.reward, reward_timeout(config)
    functions: list[Callable[..., Any] | str] = list(given) or list(schema.reward_functions(config))
    if not functions:
        return None
    served = addressed(keys.model)
    if "model" in functions:
        judge = "endpoint" if served else compute.submit(RewardModel, keys.model, config.model, compute).result()
        functions[functions.index("model")] = judge
    return Rewards(
        functions,
        weights=keys.weights,
        timeout=timeout,
        workers=keys.workers,
        options={
            "format_pattern": keys.format_pattern,
            "length_target": keys.length_target,
            "address": keys.model,
            "endpoint_concurrency": keys.concurrency,
            "endpoint_timeout": timeout,
            "panel": settings(config),
            "code_partial": keys.code_partial,
            "sandbox": {**vars(config.sandbox), "workers": at_once(config)},
        },
    )


async def check_served(config: schema.RL | schema.Eval, rewards: Rewards | None, only_warn: bool = False) -> None:
    """Raises `BirlError`, or warns, if the address of a judge, reward model or teacher is not reachable: before models
    and engines are loaded, not at the first step."""
    functions = [] if rewards is None else rewards.functions
    served = [("reward.judge", judge) for judge in config.reward.judge] if "judge" in functions else []
    served += [("reward.model", config.reward.model)] if "endpoint" in functions else []
    if isinstance(config, schema.RL):
        served += [("algorithm.teacher", path) for path in teachers_of(config).values() if addressed(path)]
    for key, address in served:
        from birl.rewards.requests import reachable

        try:
            await reachable(key, address.partition("#")[0])
        except BirlError as error:
            if not only_warn:
                raise
            print(f"Warning: {error}", flush=True)


async def started(rewards: Rewards | None, opened: AsyncExitStack) -> asyncio.Future[None]:
    """Start the rewards in the background; returns the future of the start."""
    if rewards is None:
        return asyncio.ensure_future(asyncio.sleep(0))
    starting = asyncio.create_task(rewards.start())
    opened.push_async_callback(rewards.close)
    opened.callback(starting.cancel)
    return starting
