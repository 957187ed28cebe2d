"""Configuration -> objects of an RL run. Names of the configuration are resolved here; the code below takes values."""

import asyncio
import gc
import secrets
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from birl.config import schema
from birl.config.decided import ENGINES, algorithm_notes, kind_of
from birl.data.tasks import Tasks
from birl.engine.engine import EmbeddedEngine
from birl.engine.open import check_cache, engines_of
from birl.envs.open import World, check_world, open_world
from birl.foreign import interrupting
from birl.learner.policy import DTYPES, Policy, load_policy
from birl.learner.rewards import check_served, make_rewards, started
from birl.models.device import choose, device_of
from birl.parallel.grid import ranks_here
from birl.parallel.machine import total_memory
from birl.rollout.evaluate import EvaluationPlan, plan
from birl.rollout.failures import start
from birl.rollout.group import Rollout
from birl.rollout.scorer import Progress, scorer
from birl.rollout.tasks import Loaded, limits_in, load_rows
from birl.run_folder import find_checkpoint, given
from birl.samples import LARGEST
from birl.train.build_worker import worker_of
from birl.train.parts import Parts
from birl.train.rl import Loop, Schedule
from birl.train.setup import Setup
from birl.train.step import RLWorker
from birl.types import SamplingParams, Task
from birl.waits import Watchdog, exit_at_once
from birl.weights.publisher import Memory, Publisher, Refresh

if TYPE_CHECKING:  # loaded by the runs that have them
    from birl.data.order import Order
    from birl.engines.servers import Servers
    from birl.engines.spread import Spread
    from birl.server.gateway import Gateway


async def run(setup: Setup[schema.RL]) -> dict[str, Any]:
    """The whole run, on rank 0; returns the summary."""
    config, parts = setup.config, await training(setup)
    try:
        if setup.dry_run:
            from birl.plan import run as planning

            return planning.dry_run(config, parts, setup.card)
        validates = parts.plan_validation is not None
        rows = sum(map(len, parts.train))
        state = setup.run(parts.worker, parts.tracker, rows, validates, parts.resume_from)
        state.given = given(parts.policy, parts.train, parts.worker.objective, setup.crew.ranks)
        loop = Loop(parts=parts, run=state, schedule=schedule_of(config))
        stalled = Watchdog(config.watchdog or inf, exit_at_once, setup.folder / "stall.txt")
        with stalled, interrupting(config.env.timeout):
            return await loop.fit()
    finally:
        await parts.close()


async def training(setup: Setup[schema.RL]) -> Parts:
    """Load and check everything, cheapest first. The run folder is claimed after the last check."""
    config, run, given, compute = setup.config, setup.folder, setup.given, setup.compute
    resume_from = find_checkpoint(config, run)
    check_world(config.env, given.env)
    check_gpus(config, setup.card)
    in_thread = partial(asyncio.get_running_loop().run_in_executor, setup.compute)
    async with AsyncExitStack() as opened:
        rewards = make_rewards(config, compute, given.rewards)
        await check_served(config, rewards, only_warn=setup.dry_run)
        starting = await started(rewards, opened)  # its workers, while the model loads
        policy = await in_thread(load_policy, config.model, compute, setup.crew.ranks, config.lora.quantize)
        world = await open_world(config.env, policy.chat.text, given.env, run)
        opened.push_async_callback(world.close)
        data = load_rows(config, world, policy, given)
        servers = await servers_of(setup, policy, data, opened)
        gateway = await gateway_of(config, policy, world, opened)
        await starting
        worker = await in_thread(worker_of, config, policy, setup.crew, run)
        if servers is None:
            engine = await in_thread(embedded, setup, worker, data)
            opened.push_async_callback(engine.close)
        else:
            engine = servers
            setup.claim(policy)
        progress, tracker = Progress(epochs=config.epochs), setup.tracker(sum(map(len, data.train)))
        publisher = await in_thread(publisher_of, setup, worker, servers, data.train, tracker.message)
        opened.push_async_callback(publisher.close)  # before the engines
        gc.freeze()  # the collector need not look through torch and the model again: a quarter of a second each time
        opened.callback(gc.unfreeze)
        rollout = Rollout(
            chat=policy.chat,
            open_env=world.open,
            score=scorer(rewards, progress),
            gateway=gateway,
            engine=engine,
            limits=limits_in(world, config.env, tokens=data.context),
            seed=config.seed,
            saw=start(config.rollout.max_failure_rate, config.rollout.prompts, sum(map(len, data.train))).saw,
            policies=partial(engines_of, config.policies, engine, worker.learner.policies) if config.policies else None,
        )
        return Parts(
            run=run,
            worker=worker,
            rollout=rollout,
            params=sampling(config.rollout),
            train=data.train,
            stream=setup.stream(data.train),
            order=order_of(config, data.train),
            plan_validation=planned(config, data.validation),
            tracker=tracker,
            publisher=publisher,
            resume_from=resume_from,
            reward_weights={} if rewards is None else dict(zip(rewards.names, rewards.weights, strict=True)),
            progress=progress,
            engine=engine,
            opened=opened.pop_all(),
        )


def order_of(config: schema.RL, train: Sequence[Tasks]) -> "Order | None":
    """How the run's results choose tasks (`data.order`); None: uniform. Raises `BirlError`."""
    keys = config.data
    if keys.order == "uniform":
        return None
    from birl.data.order import Order, Rule

    rule = Rule(
        by=keys.order,
        n=config.rollout.group_size,
        target=keys.order_target,
        start=keys.order_start,
        threshold=keys.order_threshold,
        half_life=keys.order_half_life,
        retire_after=keys.retire_after,
        retire_for=keys.retire_for,
    )
    end = None if config.steps else config.epochs * sum(map(len, train))
    return Order(train, rule, weights=keys.weights, seed=config.seed, steps=config.steps or None, end=end)


def check_gpus(config: schema.RL, kind: str) -> None:
    """Before anything is loaded: raises `BirlError` if an engine cannot train, or there are too few GPUs, or the GPU
    (with a dry run, the `kind` that it names) has too little memory."""
    if config.engine.kind != "embedded":
        from birl.engines.kinds import check_engine, shares

        check_engine(config.engine, trains=True)
        shares(config.engine, config.model.device, ranks_here(config))
    if kind or choose(config.model.device).type == "cuda":
        from birl.plan import run as planning

        planning.check(config, kind)


def schedule_of(config: schema.RL) -> Schedule:
    rollout, algorithm = config.rollout, config.algorithm
    return Schedule(
        groups=rollout.prompts,
        answers=rollout.group_size,
        oversample=rollout.oversample,
        max_staleness=rollout.max_staleness,
        window=rollout.order_window,
        max_refill=algorithm.max_refill,
        max_failure_rate=rollout.max_failure_rate,
        steps=config.steps or None,
        sync_every=config.weights.sync_every,
        greedy=algorithm.baseline == "greedy",
        dynamic_sampling=algorithm.dynamic_sampling,
        validate_at_start=config.validation.at_start,
        records=config.track.rollouts,
        replay=config.debug.replay,
        resample=config.debug.resample,
        notes=algorithm_notes(config),
    )


async def servers_of(setup: Setup[schema.RL], policy: Policy, data: Loaded, opened: AsyncExitStack) -> "Servers | None":
    """The engines in other processes; None if the embedded engine samples, or in a dry run."""
    config, run = setup.config, setup.folder
    if config.engine.kind == "embedded" or setup.dry_run:
        return None
    from birl.engines.servers import open_servers, wanted

    fraction = 0.0
    if config.engine.sleep and device_of(policy.model).type == "cuda":
        from birl.plan.sharing import fraction_of

        prompt, longest = max(p for p, _ in data.asked), min(max(map(sum, data.asked)), data.context)
        total = total_memory(device_of(policy.model))
        fraction = fraction_of(policy.model, config, prompt, longest, total)
    needs = wanted(config, policy, data.context, data.asked, run, fraction)
    servers = await setup.stop.unless(open_servers(config.engine, needs, ranks_here(config)))
    opened.push_async_callback(servers.close)
    return servers


async def gateway_of(config: schema.RL, policy: Policy, world: World, opened: AsyncExitStack) -> "Gateway | None":
    """The HTTP endpoint of the policy for agents; None if the environment is not an agent."""
    if not world.agent:
        return None
    from birl.server.gateway import Gateway

    gateway = Gateway(policy.chat, config.env.sampling)
    await gateway.start()
    opened.push_async_callback(gateway.close)
    return gateway


def planned(config: schema.RL, validation: Sequence[Task]) -> EvaluationPlan | None:
    if not validation:
        return None
    return plan(validation, config.validation, config.rollout.max_tokens, config.rollout.stop)


def embedded(setup: Setup[schema.RL], worker: RLWorker, data: Loaded) -> "EmbeddedEngine | Spread":
    """The engine of this process, or those of every data-parallel group of ranks as one."""
    config, context, longest = setup.config, data.context, min(max(map(sum, data.asked)), data.context)
    own = worker.engine_of(context, longest)
    for prompt, answer in data.asked:
        check_cache(config.engine, own, prompt, answer)
    if setup.dry_run:
        return own
    setup.claim(worker.policy)
    if worker.crew.ranks.shares == 1:
        return own
    from birl.engines.client import Client
    from birl.engines.spread import Spread

    token = secrets.token_hex(16)
    others = worker.crew.call(worker, RLWorker.host, token, context, longest)
    return Spread(own=own, others=[Client(a, token, timeout=config.engine.request_timeout) for a in others])


def publisher_of(
    setup: Setup[schema.RL],
    worker: RLWorker,
    servers: "Servers | None",
    train: Sequence[Tasks],
    say: Callable[[str], None],
) -> Publisher:
    """What brings the learner's weights to the engines."""
    config, policy, learner, crew = setup.config, worker.policy, worker.learner, worker.crew
    call = partial(crew.call, worker)
    if servers is None:
        return Refresh(partial(call, RLWorker.refresh), compute=policy.compute) if worker.sampled.copy else Memory()
    from birl.engines.servers import sender
    from birl.weights.gathered import Gathered
    from birl.weights.publish import cleared

    publisher = sender(config, policy, learner, servers, train, setup.folder, say)
    publisher.clear = partial(call, cleared)
    if crew.ranks.sharded:
        gather = partial(call, RLWorker.gathered)
        originally = not ENGINES[kind_of(config.engine)].own
        publisher.gathered = Gathered(learner.model, DTYPES[config.model.dtype], gather, originally)
        publisher.canary.together = partial(call, RLWorker.logprobs_of)
        publisher.canary.parts = crew.ranks.shares
    publisher.canary.begin()
    return publisher


def sampling(config: schema.Rollout) -> SamplingParams:
    """Sampling parameters of training. With top-k, top-p or min-p the engine returns the kept tokens (`support`), over
    which the learner normalises, too."""
    truncates = config.top_k > 0 or config.top_p < 1 or config.min_p > 0
    return SamplingParams(
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k or (LARGEST if truncates else 0),
        min_p=config.min_p,
        stop=tuple(config.stop),
        support=truncates,
    )
