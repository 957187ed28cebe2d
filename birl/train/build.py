"""Configuration -> objects. The only place that turns names into things; everything below takes values."""

import asyncio
import gc
import secrets
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from copy import deepcopy
from functools import partial
from pathlib import Path

from torch import nn

from birl.algorithms.kl import AdaptiveKL, FixedKL
from birl.config import schema
from birl.config.decided import CRITIC, remembers
from birl.config.load import flatten
from birl.data.tasks import Tasks
from birl.engine.engine import EmbeddedEngine
from birl.engine.open import check_cache
from birl.engines.client import Client
from birl.engines.kinds import check_engine
from birl.engines.servers import Servers, open_servers, sender, wanted
from birl.engines.spread import Spread
from birl.engines.teacher import ServedTeacher, served
from birl.envs.open import check_world, open_world
from birl.errors import BirlError
from birl.learner.comparison import KEPT
from birl.learner.export import resolved
from birl.learner.learner import Learner
from birl.learner.past import Past
from birl.learner.policy import DTYPES, Policy, load_policy
from birl.models.device import device_of
from birl.models.heads import add_score_head
from birl.models.load import load_model, load_reward_model, load_tokenizer, score_weight
from birl.models.slices import sketched, sketched_reward_model
from birl.parallel.crew import Crew
from birl.parallel.ranks import Ranks
from birl.rollout.assemble import Usage
from birl.rollout.failures import Start
from birl.rollout.group import Rollout
from birl.rollout.scorer import Progress, scorer
from birl.server.gateway import Gateway
from birl.track.tracker import Tracker
from birl.train.credit import Credit
from birl.train.evaluate import Plan, plan
from birl.train.given import Given
from birl.train.learners import make_learner
from birl.train.objective import Objective, keeps_reference, surrogate_of
from birl.train.parts import Parts
from birl.train.ranks import check_split
from birl.train.rewards import make_rewards, started
from birl.train.run_folder import claim, find_checkpoint
from birl.train.step import RLWorker
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
from birl.weights.publish import Memory, Publisher, Refresh


async def training(config: schema.RL, run: Path, given: Given, dry_run: bool, compute: Executor, crew: Crew) -> Parts:
    """Load and check everything, cheapest first; claims the run folder when nothing is left that could be wrong.
    Rewards start their workers while the model loads."""
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
        worker = await loop.run_in_executor(compute, worker_of, config, policy, crew, run)
        engine = servers
        if engine is None:
            sampler = partial(embedded, worker, context, asked, run, dry_run)
            engine = await loop.run_in_executor(compute, sampler)
            opened.push_async_callback(engine.close)
        elif not dry_run:
            claim(run, config, policy)
        total, progress = total_steps(config, train), Progress(epochs=config.epochs)
        tracker = Tracker(run, config.track, title=run.name, total_steps=total, config=flatten(config))
        publish = partial(publisher_of, worker, servers, train, run, tracker.message)
        publisher = await loop.run_in_executor(compute, publish)
        opened.push_async_callback(publisher.close)  # before the engines
        gc.freeze()  # the collector need not look through torch and the model again: a quarter of a second each time
        opened.callback(gc.unfreeze)
        return Parts(
            run=run,
            worker=worker,
            engine=engine,
            rollout=Rollout(
                chat=policy.chat,
                open_env=world.open,
                score=scorer(rewards, progress),
                gateway=gateway,
                engine=engine,
                limits=limits_of(config.env, tokens=context),
                seed=config.seed,
                saw=Start(config.rollout.max_failure_rate).saw,
            ),
            params=sampling(config.rollout),
            train=train,
            plan_validation=planned(config, validation),
            tracker=tracker,
            publisher=publisher,
            resume_from=resume_from,
            total_steps=total,
            reward_weights={} if rewards is None else dict(zip(rewards.names, rewards.weights, strict=True)),
            progress=progress,
            opened=opened.pop_all(),
        )


def planned(config: schema.RL, validation: list[Task]) -> Plan | None:
    if not validation:
        return None
    return plan(validation, config.validation, config.rollout.max_tokens, config.rollout.stop)


def embedded(
    worker: RLWorker, context: int, asked: list[tuple[int, int]], run: Path, dry_run: bool
) -> EmbeddedEngine | Spread:
    """The engine of this process, or those of every data-parallel group of ranks as one. `asked`: the longest prompts
    and answers [tokens]."""
    config, longest = worker.config, min(max(map(sum, asked)), context)
    own = worker.sampler(context, longest)
    for prompt, answer in asked:
        check_cache(config.engine, own, prompt, answer)
    if dry_run:
        return own
    claim(run, config, worker.policy)
    if worker.crew.ranks.shares == 1:
        return own
    token = secrets.token_hex(16)
    others = worker.crew.call(worker, RLWorker.host, token, context, longest)
    return Spread(own=own, others=[Client(a, token, timeout=config.engine.request_timeout) for a in others])


def publisher_of(
    worker: RLWorker, servers: Servers | None, train: list[Tasks], run: Path, say: Callable[[str], None]
) -> Publisher:
    """How the learner's weights come to the engines."""
    config, policy, learner, crew = worker.config, worker.policy, worker.learner, worker.crew
    call = partial(crew.call, worker)
    if servers is None:
        return Refresh(partial(call, RLWorker.refresh), compute=policy.compute) if crew.ranks.sharded else Memory()
    publisher = sender(config, policy, learner, servers, train, run, say)
    if crew.ranks.sharded:
        gather = partial(call, RLWorker.gathered)
        publisher.gathered = Gathered(learner.model, DTYPES[config.model.dtype], gather)
        publisher.canary.together = partial(call, RLWorker.said)
        publisher.canary.parts = crew.ranks.shares
    return publisher


def worker_of(config: schema.RL, policy: Policy, crew: Crew, run: Path) -> RLWorker:
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
    target = keys.kl_target
    return RLWorker(
        config=config,
        optimizer=config.optimizer,
        keys=config.checkpoint,
        folder=run,
        policy=policy,
        learner=learner,
        critic=critic,
        objective=objective,
        credit=credit,
        kl=AdaptiveKL(keys.kl_coef, target, keys.kl_horizon) if target else FixedKL(keys.kl_coef),
        past=Past(learner, min(config.rollout.max_staleness, KEPT)),
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


def sampling(config: schema.Rollout) -> SamplingParams:
    return SamplingParams(
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        stop=tuple(config.stop),
    )
