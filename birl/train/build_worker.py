"""Configuration -> the worker that every rank of `birl rl` has: learners, objective, credit assignment."""

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

from birl.algorithms.custom import NamedFunction
from birl.algorithms.kl import AdaptiveKL
from birl.config import schema
from birl.config.decided import CRITIC, corrects, proximal, remembers, teachers_of
from birl.data.tasks import teacher_named
from birl.engine.open import Sampled
from birl.hub import addressed
from birl.learner.comparison import GAPS, KEPT, Past
from birl.learner.learner import Learner
from birl.learner.open import distilled, frozen, local_teachers, make_learner, other_model, own_teacher, replays
from birl.learner.policy import Policy
from birl.models.heads import add_score_head, head
from birl.parallel.crew import RankGroup
from birl.rollout.assemble import Usage
from birl.train.credit import Credit
from birl.train.objective import Objective, keeps_reference, surrogate_of
from birl.train.setup import packer_of, worker_fields
from birl.train.step import RLWorker, Updates


def worker_of(config: schema.RL, policy: Policy, crew: RankGroup, run: Path) -> RLWorker:
    """The worker of this rank. Copies of the initial weights come before the learner, which changes the model."""
    keys, separate_critic = config.algorithm, config.algorithm.advantage in CRITIC and not config.critic.shared
    surrogate = surrogate_of(keys)
    reference = critic = None
    if keeps_reference(keys, surrogate):
        reference = frozen(config, deepcopy(policy.model), crew.ranks)
    past = own_teacher(config, policy, crew.ranks)
    if separate_critic:
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
    values = None
    if keys.advantage in CRITIC:
        values = crew.each(learner.values if critic is None else critic.forward)
    reference_logprobs = None if reference is None else crew.each(reference.forward)
    hints = None
    if keys.hint:
        from birl.rollout.hints import Hints

        hints = Hints(texts=keys.hint, chat=policy.chat, context=policy.context)
    sampled = Sampled(policy=policy, learner=learner, dtype=config.model.dtype)
    return RLWorker(
        **worker_fields(config, crew.ranks, run),
        updates=updates_of(config, policy.pair_cost),
        policy=policy,
        dtype=config.model.dtype,
        engine_of=partial(sampled.engine, config.engine, routes=replays(config)),
        learner=learner,
        critic=critic,
        objective=objective_of(
            config, learner, surrogate, reference=reference_logprobs, logp_and_entropy=crew.each(learner.look)
        ),
        credit=credit_of(
            config,
            policy.pair_cost,
            reference=reference_logprobs,
            critic=values,
            **teacher_of(config, policy, crew, past or learner),
            hints=hints,
            learner=crew.each(learner.forward) if remembers(config) else None,
        ),
        kl=AdaptiveKL(keys.kl_coef, keys.kl_target, keys.kl_horizon),
        sampled=sampled,
        past=Past(learner, min(config.rollout.max_staleness, KEPT), crew, config.engine.weights == "int8"),
        crew=crew,
    )


def teacher_of(config: schema.RL, policy: Policy, crew: RankGroup, own: Learner) -> dict[str, Any]:
    """Arguments of `Credit` that name the teacher: log-probs of the sampled tokens, or of a served teacher its top-k
    tokens. `own`: the learner that is the teacher with algorithm.teacher=self."""
    paths, sampled = teachers_of(config), config.algorithm.teacher_divergence == "sampled"
    result: dict[str, Any] = {}
    if config.algorithm.teachers:
        result["teacher_name"] = partial(teacher_named, column=config.algorithm.teacher_column, names=tuple(paths))
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


def updates_of(config: schema.RL, pair_cost: float) -> Updates:
    keys, critic = config.algorithm, config.critic
    # all tokens are compared, or each has a loss of its own, or may have: that of a user's surrogate
    everything = keys.entropy_control != "none" or keys.advantage in CRITIC or keys.entropy_coef > 0
    everything |= max(config.learner.router_aux_coef, keys.observation_coef) > 0 or ":" in keys.surrogate
    everything |= keys.teacher_divergence != "sampled" and not keys.hint  # with one, where there is a hint
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
