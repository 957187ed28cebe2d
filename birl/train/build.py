"""Configuration -> objects. The only place that turns names into things; everything below takes values."""

import asyncio
import gc
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from birl.config import schema
from birl.config.load import flatten
from birl.config.rules_algorithm import CRITIC, remembers
from birl.data.tasks import Tasks
from birl.engine.engine import EmbeddedEngine
from birl.engine.policy import DTYPES, Policy, check_cache, load_policy
from birl.engines.client import Client
from birl.engines.kinds import check_engine
from birl.engines.servers import Servers, open_servers, sender, wanted
from birl.engines.spread import Spread
from birl.engines.teacher import ServedTeacher, served
from birl.envs.open import check_world, open_world
from birl.errors import BirlError
from birl.learner.export import resolved
from birl.learner.learner import Learner
from birl.learner.lora import Lora
from birl.models.device import device_of
from birl.models.heads import add_score_head
from birl.models.load import load_model, load_reward_model, load_tokenizer, score_weight
from birl.models.slices import sketched, sketched_reward_model
from birl.parallel.crew import Crew
from birl.parallel.ranks import Ranks
from birl.rewards.score import Rewards
from birl.rollout.assemble import Usage
from birl.rollout.group import Rollout
from birl.server.gateway import Gateway
from birl.track.tracker import Tracker
from birl.train import checks
from birl.train.credit import Credit
from birl.train.evaluate import plan
from birl.train.objective import Objective, keeps_reference, surrogate_of
from birl.train.parts import Parts, replays
from birl.train.ranks import check_split
from birl.train.rewards import Progress, make_rewards, scorer, started
from birl.train.run_folder import claim, find_checkpoint
from birl.train.tasks import (
    check_lengths,
    context_of,
    lengths,
    limits_of,
    load_data,
    report_data,
    tell_plain,
    total_steps,
)
from birl.types import SamplingParams, Task
from birl.weights.gathered import Gathered
from birl.weights.publish import Memory, Refresh


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a Python program hands over instead of naming it: see `birl.Trainer`."""

    rewards: Sequence[Callable[..., Any] | str] = ()
    env: Any = None  # a class or function, as env.kind names one
    train: Any = None  # rows: a datasets.Dataset or a list of dicts
    validation: Any = None


async def training(config: schema.RL, run: Path, given: Given, dry_run: bool, compute: Executor, crew: Crew) -> Parts:
    """Load and check everything, cheapest first. Rewards start their workers while the model loads."""
    resume_from = find_checkpoint(config, run)
    check_world(config.env, given.env)
    check_engine(config.engine, trains=True)
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as opened:
        rewards = make_rewards(config, compute, given.rewards)
        starting = await started(rewards, opened)
        policy = await loop.run_in_executor(compute, load_policy, config.model, compute, crew.ranks)
        world = await open_world(config.env, policy.chat.text, given.env, run)
        context = context_of(config, world, policy.context)
        opened.push_async_callback(world.close)
        train, validation = load_data(config, world, policy.chat, context, given.train, given.validation)
        if config.data.train or given.train is not None:
            report_data(train, validation)
            tell_plain(policy.chat, [tasks[0] for tasks in train])
        check_lengths(config, world, train, policy.chat)
        asked = lengths(config, world, policy, train, validation, context)
        servers = None
        if config.engine.kind != "embedded" and not dry_run:
            servers = await open_servers(config.engine, wanted(config, policy, context, asked, run))
            opened.push_async_callback(servers.close)
        gateway = Gateway(policy.chat, config.env.sampling) if world.agent else None
        if gateway is not None:
            await gateway.start()
            opened.push_async_callback(gateway.close)
        await starting
        progress = Progress(epochs=config.epochs)
        judge = scorer(rewards, progress)
        rollout = partial(Rollout, chat=policy.chat, open_env=world.open, score=judge, gateway=gateway)
        ready = partial(
            assembled, config, policy, context, rewards, rollout, train, validation, run, resume_from, dry_run, asked,
            servers, crew,
        )  # fmt: skip
        parts = await loop.run_in_executor(compute, ready)
        if servers is None:
            opened.push_async_callback(parts.engine.close)
        opened.push_async_callback(parts.publisher.close)  # before the engines
        gc.freeze()  # the collector need not look through torch and the model again: a quarter of a second each time
        opened.callback(gc.unfreeze)
        parts.progress = progress
        parts.opened = opened.pop_all()
        return parts


def assembled(
    config: schema.RL,
    policy: Policy,
    context: int,
    rewards: Rewards | None,
    rollout: Callable[..., Rollout],
    train: list[Tasks],
    validation: list[Task],
    run: Path,
    resume_from: Path | None,
    dry_run: bool,
    asked: list[tuple[int, int]],
    servers: Servers | None,
    crew: Crew,
) -> Parts:
    """Everything that needs the model and the data; claims the run folder when nothing is left that could be wrong."""
    parts = learning(config, policy, crew)
    learner, longest = parts.learner, min(max(map(sum, asked)), context)
    engine = servers or parts.sampler(context, longest)
    if isinstance(engine, EmbeddedEngine):
        for prompt, answer in asked:
            check_cache(config.engine, engine, prompt, answer)
    limits = limits_of(config.env, tokens=context)
    total = total_steps(config, train)
    if not dry_run:
        claim(run, config, policy)
        if isinstance(engine, EmbeddedEngine) and crew.ranks.shares > 1:
            engine = spread(parts, engine, context, longest)
    tracker = Tracker(run, config.track, title=run.name, total_steps=total, config=flatten(config))
    parts.run, parts.engine, parts.tracker, parts.train = run, engine, tracker, train
    saw = checks.Start(config.rollout).saw
    parts.rollout = rollout(engine=engine, limits=limits, seed=config.seed, saw=saw)
    parts.params = sampling(config.rollout)
    parts.resume_from, parts.total_steps = resume_from, total
    if rewards is not None:
        parts.credit.weights = dict(zip(rewards.names, rewards.weights, strict=True))
    if validation:
        parts.plan_validation = plan(validation, config.validation, config.rollout.max_tokens, config.rollout.stop)
    if servers is not None:
        parts.publisher = sender(config, policy, learner, servers, train, run, tracker.message)
        if crew.ranks.sharded:
            gather = partial(crew.call, parts, "gathered")
            parts.publisher.gathered = Gathered(learner.model, DTYPES[config.model.dtype], gather)
            parts.publisher.canary.together = partial(crew.call, parts, "said")
            parts.publisher.canary.parts = crew.ranks.shares
    elif crew.ranks.sharded:
        parts.publisher = Refresh(partial(crew.call, parts, "refresh"), compute=policy.compute)
    else:
        parts.publisher = Memory()
    return parts


def spread(parts: Parts, own: EmbeddedEngine, context: int, longest: int) -> Spread:
    """The engine of every data-parallel group of ranks, as one."""
    token = secrets.token_hex(16)
    others = parts.crew.call(parts, "host", token, context, longest)
    return Spread(own=own, others=[Client(a, token, timeout=parts.config.engine.request_timeout) for a in others])


def learning(config: schema.RL, policy: Policy, crew: Crew) -> Parts:
    """What every rank has: the policy's learner, what it minimises, how its answers are judged; copies of the first
    weights come first."""
    keys, own = config.algorithm, config.algorithm.advantage in CRITIC and not config.critic.shared
    surrogate = surrogate_of(keys)
    frozen = partial(
        Learner,
        dtype=DTYPES[config.model.dtype],
        temperature=config.rollout.temperature,
        trainable=False,
        ranks=crew.ranks,
    )
    reference = teacher = critic = None
    if keeps_reference(keys, surrogate):
        reference = frozen(deepcopy(policy.model))
    if served(keys.teacher):
        teacher = ServedTeacher(keys.teacher)
    elif keys.teacher:
        teacher = frozen(other_model(config, keys.teacher, policy, "algorithm.teacher", crew.ranks))
    if own:
        path = config.critic.path
        body = other_model(config, path, policy, "critic.path", crew.ranks) if path else deepcopy(policy.model)
        add_score_head(body, config.seed)
        critic = make_learner(config, body, crew.ranks, routed=False)
    elif keys.advantage in CRITIC:
        add_score_head(policy.model, config.seed, "value")
    learner = make_learner(config, policy.model, crew.ranks)
    objective = Objective(config=config, learner=learner, reference=reference, surrogate=surrogate)
    says = None
    if keys.advantage in CRITIC:
        says = partial(learner.each, verb=learner.values)
        if critic is not None:
            says = partial(critic.each, verb=critic.forward)
    usage = Usage(failed=config.rollout.failed, truncated=config.rollout.truncated)
    credit = Credit(
        config=config,
        usage=usage,
        reference=reference,
        critic=says,
        teacher=teacher,
        learner=learner if remembers(config) else None,
        pair_cost=policy.pair_cost,
    )
    return Parts(
        config=config,
        run=Path(config.run),
        policy=policy,
        learner=learner,
        reference=reference,
        critic=critic,
        objective=objective,
        credit=credit,
        crew=crew,
    )


def other_model(config: schema.RL, path: str, policy: Policy, key: str, ranks: Ranks) -> nn.Module:
    """A model that reads the policy's own tokens."""
    folder = resolved(path, key)
    tokenizer = load_tokenizer(folder)
    if tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise BirlError(
            f"{key}={path}: has another vocabulary than model.path={config.model.path}, so its tokens mean something "
            "else. Take a model of the same family."
        )
    check_split(config, folder)
    scores = key == "critic.path" and any(score_weight(file) is not None for file in folder.glob("*.safetensors"))
    if ranks.sharded:
        return (sketched_reward_model if scores else sketched)(folder, device_of(policy.model))
    return (load_reward_model if scores else load_model)(folder).to(device_of(policy.model))


def check_device(config: schema.RL | schema.Stage, device: torch.device) -> None:
    if config.optimizer.offload == "cpu" and device.type == "cpu":
        raise BirlError(
            "optimizer.offload=cpu: the weights are in CPU memory already, so there is nothing to gain. Set "
            "optimizer.offload=none."
        )


def make_learner(
    config: schema.RL | schema.Stage, model: nn.Module, ranks: Ranks | None = None, routed: bool = True
) -> Learner:
    """The learner that is trained. Its log-probs are those of the temperature that sampled, where something did.
    `routed`: what the configuration says of routers is about this model."""
    optimizer = config.optimizer
    check_device(config, device_of(model))
    return Learner(
        model,
        dtype=DTYPES[config.model.dtype],
        temperature=config.rollout.temperature if isinstance(config, schema.RL) else 1.0,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
        gradient_checkpointing=config.learner.gradient_checkpointing,
        offload=optimizer.offload == "cpu",
        lora=lora_of(config),
        ranks=ranks,
        router_aux_coef=config.learner.router_aux_coef if routed else 0.0,
        router_replay=routed and replays(config),
    )


def lora_of(config: schema.RL | schema.Stage) -> Lora | None:
    lora = config.lora
    if lora.rank == 0:
        return None
    return Lora(rank=lora.rank, alpha=lora.alpha, targets=tuple(lora.targets), dora=lora.dora, seed=config.seed)


def sampling(config: schema.Rollout) -> SamplingParams:
    return SamplingParams(
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        stop=tuple(config.stop),
    )
