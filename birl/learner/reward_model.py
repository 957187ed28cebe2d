"""A reward model that judges answers: `reward.functions=[model] reward.model=FOLDER`.

It is a frozen learner with a score head; it computes on the thread of the engine and the learner, packed, each prompt
once for all its answers.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

from birl.config import schema
from birl.data.columns import by_sample
from birl.data.messages import messages_of
from birl.data.pack import pack
from birl.data.sequences import Encoder, Tokens, Unfit, scored
from birl.errors import BirlError
from birl.learner.export import resolved
from birl.learner.learner import Learner
from birl.learner.policy import DTYPES
from birl.models.device import choose
from birl.models.load import context_limit, end_ids, load_reward_model, load_tokenizer
from birl.models.verify import verify
from birl.text.chat import Chat


class RewardModel:
    """A reward function: (completions, prompts) -> scores. Raises `BirlError` where the folder holds no reward
    model."""

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
        """One score for each completion. Raises `BirlError` for what is longer than the model's context."""
        pairs = enumerate(zip(prompts, completions, strict=True))
        samples = [scored(self.read(p, c), self.group(prompts, i)) for i, (p, c) in pairs]
        batches = pack(samples, [0.0] * len(samples), self.tokens)
        result = by_sample(batches, self.learner.each(batches, self.learner.forward), len(samples))
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
        """Neighbours with one prompt share it."""
        while index > 0 and prompts[index] == prompts[index - 1]:
            index -= 1
        return index
