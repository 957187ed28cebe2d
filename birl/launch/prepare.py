"""What an engine of a run needs to know, where the run itself is another process: from the model's files and the data,
without weights."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from birl.config import schema
from birl.engines.kinds import Wanted
from birl.engines.servers import wanted
from birl.envs.open import World
from birl.envs.single_turn import SingleTurn
from birl.learner.export import resolved
from birl.learner.policy import Policy, load_reader
from birl.models.load import skeleton
from birl.rollout.tasks import lengths, load_data


def prepared(config: schema.RL) -> Wanted:
    """The same as the run's. Raises `BirlError`."""
    reader = load_reader(config.model)
    folder = resolved(config.model.path)
    model = skeleton(folder)
    policy = Policy(
        folder=folder, model=model, tokenizer=reader.chat.tokenizer, chat=reader.chat, compute=ThreadPoolExecutor(1)
    )
    context = min(config.model.max_length or reader.context, reader.context)
    return wanted(config, policy, context, asked(config, policy, context), Path(config.run))


def asked(config: schema.RL, policy: Policy, context: int) -> list[tuple[int, int]]:
    """The longest prompt and answer [tokens], which bound the memory for keys and values where it is not given."""
    if config.engine.kv_cache_gb or config.env.kind != "single_turn":
        return [(context, 0)]
    world = World(kind="single_turn", open=SingleTurn, turns=False)
    train, validation = load_data(config, world, policy.chat, context)
    return lengths(config, world, policy, train, validation, context)
