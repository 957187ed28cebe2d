"""reasoning-gym: more than a hundred kinds of procedural problems, each judged by its own `score_answer`.

birl rl env=reasoning_gym env.task=chain_sum env.parameters=[max_terms=3]
"""

from dataclasses import dataclass, field
from typing import Any

from birl.config.schema.kinds import Whole
from birl.envs.adapters.package import arguments, imported, unknown
from birl.envs.tasks.rows import Drawn
from birl.errors import BirlError
from birl.types import Feedback, Message, Task

KIND = "reasoning_gym"


class ReasoningGym:
    @dataclass(kw_only=True)
    class Config(Drawn):
        task: str = "chain_sum"
        """Dataset name in reasoning-gym."""
        parameters: list[str] = field(default_factory=list[str])
        """Parameters of the dataset: [max_terms=3]."""
        validation_rows: Whole = 100
        """Held-out problems, which follow the training problems."""
        seed: int = 0
        """Seed of all problems. Consecutive seeds share nearly all problems."""
        system: str = "simple"
        """System prompt: one of the package's SYSTEM_PROMPTS (DeepSeekZero, default, simple, direct, chain_of_draft),
        or your own text."""
        tag: str = "answer"
        """Tag of the answer, as in <answer>...</answer>. Empty: the whole reply is the answer."""

    @staticmethod
    def shared(config: Config) -> Any:
        """The dataset. Problems are generated on access, from the seed and their number."""
        package, factory = imported("reasoning_gym", KIND), imported("reasoning_gym.factory", KIND)
        if config.task not in factory.DATASETS:
            raise unknown("env.task", config.task, factory.DATASETS)
        try:
            size = config.rows + config.validation_rows
            return package.create_dataset(config.task, size=size, seed=config.seed, **arguments(config.parameters))
        except (TypeError, AssertionError, ValueError) as error:
            raise BirlError(f"env.parameters={config.parameters}: {config.task}: {error}") from error

    @staticmethod
    def tasks(config: Config, split: str, shared: Any) -> list[dict[str, Any]]:
        train = split == "train"
        numbers = range(config.rows) if train else range(config.rows, config.rows + config.validation_rows)
        problems = ((i, shared[i]) for i in numbers)
        return [{"prompt": p["question"], "answer": str(p["answer"]), "number": i} for i, p in problems]

    def __init__(self, task: Task, config: Config, shared: Any) -> None:
        self.config, self.dataset = config, shared
        self.problem = shared[task.columns["number"]]
        self.package = imported("reasoning_gym.utils", KIND)

    async def start(self) -> tuple[Message, ...]:
        system = self.package.SYSTEM_PROMPTS.get(self.config.system, self.config.system)
        asked = Message(role="user", content=self.problem["question"])
        return (Message(role="system", content=system), asked) if system else (asked,)

    def step(self, reply: Message) -> Feedback:
        tag = self.config.tag
        answer = self.package.extract_answer(reply.content, tag) if tag else reply.content.strip()
        return Feedback(reward=float(self.dataset.score_answer(answer=answer, entry=self.problem)), done=True)

    async def close(self) -> None:
        pass
