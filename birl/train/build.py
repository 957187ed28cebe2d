"""Configuration -> objects. The only place that turns names into things; everything below takes values."""

import asyncio
import gc
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from copy import deepcopy
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from birl.algorithms.custom import NamedFunction
from birl.algorithms.kl import AdaptiveKL, FixedKL
from birl.blocked import interrupting
from birl.config import schema
from birl.config.decided import (
    CRITIC,
    ENGINES,
    algorithm_notes,
    corrects,
    kind_of,
    proximal,
    remembers,
    teachers_of,
)
from birl.data.tasks import Tasks, teacher_named
from birl.engine.engine import EmbeddedEngine
from birl.engine.open import check_cache
from birl.engine.policies import engines_of
from birl.engine.sampled import Sampled
from birl.envs.open import World, check_world, open_world
from birl.hub import addressed
from birl.learner.comparison import GAPS, KEPT, Past
from birl.learner.learner import Learner
from birl.learner.open import distilled, frozen, local_teachers, make_learner, other_model, own_teacher, replays
from birl.learner.policy import DTYPES, Policy, load_policy
from birl.learner.rewards import check_served, make_rewards, started
from birl.models.device import choose, device_of
from birl.models.forward import head
from birl.models.heads import add_score_head
from birl.parallel.crew import RankGroup
from birl.parallel.grid import ranks_here
from birl.parallel.machine import total_memory
from birl.rollout.assemble import Usage
from birl.rollout.evaluate import EvaluationPlan, plan
from birl.rollout.failures import start
from birl.rollout.group import Rollout
from birl.rollout.scorer import Progress, scorer
from birl.rollout.tasks import Loaded, limits_in, load_rows, total_steps
from birl.run_folder import find_checkpoint
from birl.support import LARGEST
from birl.train.credit import Credit
from birl.train.objective import Objective, keeps_reference, surrogate_of
from birl.train.parts import Parts
from birl.train.rl import Loop, Schedule
from birl.train.setup import Setup, kept, packer_of
from birl.train.step import RLWorker, Updates
from birl.types import SamplingParams, Task
from birl.waits import Watchdog, exit_at_once
from birl.weights.publisher import Memory, Publisher, Refresh

if TYPE_CHECKING:  # loaded by the runs that have them
    from birl.data.order import Order
    from birl.engines.servers import Servers
    from birl.engines.spread import Spread
    from birl.rollout.hints import Hints
    from birl.server.gateway import Gateway


async def run(setup: Setup[schema.RL]) -> dict[str, Any]:
    """The whole run, on rank 0; the summary."""
    config, parts = setup.config, await training(setup)
    try:
        if setup.dry_run:
            from birl.plan import run as planning

            return planning.dry_run(config, parts, setup.card)
        validates = parts.plan_validation is not None
        state = setup.run(parts.worker, parts.tracker, validates, parts.resume_from)
        loop = Loop(parts=parts, run=state, schedule=schedule_of(config))
        stalled = Watchdog(config.watchdog or inf, exit_at_once, setup.folder / "stall.txt")
        with stalled, interrupting(config.env.timeout):
            return await loop.to_the_end()
    finally:
        await parts.close()


def worker(config: schema.RL, crew: RankGroup, compute: Executor) -> RLWorker:
    """A rank other than 0, which has none of the data."""
    policy = load_policy(config.model, compute, crew.ranks, config.lora.quantize)
    policy.keep_pictures(Path(config.run))
    return worker_of(config, policy, crew, Path(config.run))


async def training(setup: Setup[schema.RL]) -> Parts:
    """Load and check everything, cheapest first; claims the run folder when nothing is left that could be wrong."""
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
        total, progress = total_steps(config, data.train), Progress(epochs=config.epochs)
        tracker = setup.tracker(total)
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
            order=order_of(config, data.train, total),
            plan_validation=planned(config, data.validation),
            tracker=tracker,
            publisher=publisher,
            resume_from=resume_from,
            total_steps=total,
            reward_weights={} if rewards is None else dict(zip(rewards.names, rewards.weights, strict=True)),
            progress=progress,
            engine=engine,
            opened=opened.pop_all(),
        )


def order_of(config: schema.RL, train: Sequence[Tasks], steps: int | None) -> "Order | None":
    """How tasks are chosen by the run's results; None: by chance, in epochs. Raises `BirlError`."""
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
    return Order(train, rule, weights=keys.weights, seed=config.seed, steps=steps, end=end)


def check_gpus(config: schema.RL, kind: str) -> None:
    """Before anything is loaded: engines that are not what they must be, too few GPUs, and a GPU that is too small, or
    the `kind` that a dry run names. Raises `BirlError`."""
    if config.engine.kind != "embedded":
        from birl.engines.gpus import shares
        from birl.engines.kinds import check_engine

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
    """The engines in other processes; None where the embedded one samples, or nothing does."""
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
    """Where agents find the policy behind HTTP; None where the environment takes turns with it."""
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
    """How the learner's weights come to the engines."""
    config, policy, learner, crew = setup.config, worker.policy, worker.learner, worker.crew
    call = partial(crew.call, worker)
    if servers is None:
        return Refresh(partial(call, RLWorker.refresh), compute=policy.compute) if worker.sampled.copy else Memory()
    from birl.engines.servers import sender
    from birl.weights.gathered import Gathered

    publisher = sender(config, policy, learner, servers, train, setup.folder, say)
    if crew.ranks.sharded:
        gather = partial(call, RLWorker.gathered)
        originally = not ENGINES[kind_of(config.engine)].own
        publisher.gathered = Gathered(learner.model, DTYPES[config.model.dtype], gather, originally)
        publisher.canary.together = partial(call, RLWorker.logprobs_of)
        publisher.canary.parts = crew.ranks.shares
    publisher.canary.begin()
    return publisher


def worker_of(config: schema.RL, policy: Policy, crew: RankGroup, run: Path) -> RLWorker:
    """What every rank has: the policy's learner, what it minimises, how its answers are judged; copies of the first
    weights come first."""
    keys, own = config.algorithm, config.algorithm.advantage in CRITIC and not config.critic.shared
    surrogate = surrogate_of(keys)
    reference = critic = None
    if keeps_reference(keys, surrogate):
        reference = frozen(config, deepcopy(policy.model), crew.ranks)
    past = own_teacher(config, policy, crew.ranks)
    if own:
        path = config.critic.path
        body = other_model(config, path, policy, "critic.path", crew.ranks) if path else deepcopy(policy.model)
        add_score_head(body, config.seed)
        body.frozen_attention = config.critic.freeze_attention  # pyright: ignore  read by `still`
        critic = make_learner(config, body, crew.ranks, routed=False)
    elif keys.advantage in CRITIC:
        add_score_head(policy.model, config.seed, "value")
    learner = make_learner(config, policy.model, crew.ranks)
    learner.teacher = distilled(config, policy, crew.ranks, past or learner)
    if past is not None and keys.teacher_rate > 0:
        from birl.learner.distillation import Average

        learner.average = Average(past, keys.teacher_rate)
    says = None
    if keys.advantage in CRITIC:
        says = crew.each(learner.values if critic is None else critic.forward)
    refers = None if reference is None else crew.each(reference.forward)
    target, sampled = keys.kl_target, Sampled(policy=policy, learner=learner, dtype=config.model.dtype)
    return RLWorker(
        **kept(config, crew.ranks, run),
        updates=updates_of(config, policy.pair_cost),
        policy=policy,
        dtype=config.model.dtype,
        engine_of=partial(sampled.engine, config.engine, routes=replays(config)),
        learner=learner,
        critic=critic,
        objective=objective_of(config, learner, surrogate, reference=refers, looked=crew.each(learner.look)),
        credit=credit_of(
            config,
            policy.pair_cost,
            reference=refers,
            critic=says,
            **teacher_of(config, policy, crew, past or learner),
            hints=hints_of(config, policy),
            learner=crew.each(learner.forward) if remembers(config) else None,
        ),
        kl=AdaptiveKL(keys.kl_coef, target, keys.kl_horizon) if target else FixedKL(keys.kl_coef),
        sampled=sampled,
        past=Past(learner, min(config.rollout.max_staleness, KEPT), crew, config.engine.weights == "int8"),
        crew=crew,
    )


def teacher_of(config: schema.RL, policy: Policy, crew: RankGroup, own: Learner) -> dict[str, Any]:
    """What `Credit` asks a teacher: log-probs of the sampled tokens, or one that is served for its most likely tokens.
    `own`: that of algorithm.teacher=self."""
    paths, sampled = teachers_of(config), config.algorithm.teacher_divergence == "sampled"
    result: dict[str, Any] = {}
    if config.algorithm.teachers:
        result["whose"] = partial(teacher_named, column=config.algorithm.teacher_column, names=tuple(paths))
    served, asked = {name: path for name, path in paths.items() if addressed(path)}, None
    if served:
        from birl.engines.teacher import ServedTeachers

        asked = ServedTeachers(served, head(policy.model).weight.shape[0], lambda t: str(policy.tokenizer.decode([t])))
        if not sampled:
            return result | {"likely": partial(asked.top_logprobs, k=config.algorithm.teacher_top_k)}
    if paths and sampled:
        from birl.learner.distillation import taught_by

        result["teacher"] = taught_by(local_teachers(config, paths, policy, crew.ranks, own), asked, crew)
    return result


def hints_of(config: schema.RL, policy: Policy) -> "Hints | None":
    if not config.algorithm.hint:
        return None
    from birl.rollout.hints import Hints

    return Hints(texts=config.algorithm.hint, chat=policy.chat, context=policy.context)


def updates_of(config: schema.RL, pair_cost: float) -> Updates:
    keys, critic = config.algorithm, config.critic
    # all tokens are compared, or each has a loss of its own
    everything = keys.entropy_control != "none" or keys.advantage in CRITIC or keys.entropy_coef > 0
    everything |= keys.teacher_divergence != "sampled" and not keys.hint  # with one, where there is a hint
    everything |= keys.observation_coef > 0
    kind = config.model.dtype if config.engine.recompute_kv else "bfloat16"  # keys of older weights differ more
    return Updates(
        seed=config.seed,
        parts=keys.updates_per_batch,
        passes=keys.passes,
        denominator=keys.denominator,
        max_tokens=config.rollout.max_tokens,
        pack=packer_of(config, pair_cost),
        everything=everything,
        observations=keys.observation_coef > 0,
        max_staleness=config.rollout.max_staleness,
        max_gap=config.learner.max_logprob_gap or GAPS[kind],
        token_figures=config.track.rollouts and config.track.token_figures,
        critic_only=critic.freeze_steps,
        critic_lr=critic.lr,
        critic_passes=critic.passes,
        rollouts_only=config.debug.only_rollout,
        league=config.league.every,
    )


def objective_of(config: schema.RL, learner: Learner, surrogate: NamedFunction, **models: Any) -> Objective:
    """`models`: those of `Objective`."""
    start = proximal(config)
    return Objective(
        keys=config.algorithm,
        critic_keys=config.critic,
        start="now" if start == "recompute" and not remembers(config) else start,
        corrected=corrects(config),
        learner=learner,
        surrogate=surrogate,
        **models,
    )


def credit_of(config: schema.RL, pair_cost: float = 0.0, **models: Any) -> Credit:
    """`models`: those of `Credit`."""
    return Credit(
        keys=config.algorithm,
        critic_keys=config.critic,
        max_tokens=config.rollout.max_tokens,
        pack=packer_of(config, pair_cost),
        usage=Usage(failed=config.rollout.failed, truncated=config.rollout.truncated),
        mixture=config.env.kind == "mixture",
        **models,
    )


def sampling(config: schema.Rollout) -> SamplingParams:
    """Where words are left out, engines say which were not: log-probs are over the same ones."""
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
