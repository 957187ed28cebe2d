"""Configuration -> objects, for the loop over rows: SFT, reward models and preference losses."""

import asyncio
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from birl.algorithms import preference
from birl.algorithms.custom import part
from birl.config import schema
from birl.config.check import capacity_setting, needed_setting
from birl.config.decided import check_warmup
from birl.data.examples import Examples, load_examples
from birl.data.tasks import split_validation
from birl.errors import BirlError
from birl.learner.learner import Learner
from birl.learner.open import distilled, make_learner
from birl.learner.policy import DTYPES, Policy, load_policy
from birl.learner.reference import Reference, weights_of
from birl.models.heads import add_score_head
from birl.parallel.crew import RankGroup
from birl.run_folder import find_checkpoint, given
from birl.train.dpo import Preferences
from birl.train.offline import Loop, Objective, Rows, RowsWorker
from birl.train.rm import Ranking
from birl.train.setup import Setup, packer_of, worker_fields
from birl.train.sft import Likelihood, imitation, negative_log_likelihood


async def run(setup: Setup[schema.Stage]) -> dict[str, Any]:
    """The whole run, on rank 0; returns the summary."""
    loop = await asyncio.get_running_loop().run_in_executor(setup.compute, assembled, setup)
    try:
        return await (loop.dry_run() if setup.dry_run else loop.fit())
    finally:
        await asyncio.to_thread(loop.worker.checkpoints.writer.finish)
        loop.run.tracker.close()


def assembled(setup: Setup[schema.Stage]) -> Loop:
    """Load and check everything, cheapest first. The run folder is claimed after the last check."""
    config = setup.config
    resume_from = find_checkpoint(config, setup.folder)
    policy = load_policy(config.model, setup.compute, setup.crew.ranks, config.lora.quantize)
    train, held_out = examples(config, policy, setup)
    check_warmup(config, sum(map(len, train)))
    check_lengths(config, [*chain(*train, *held_out)])
    worker = worker_of(config, policy, setup.crew, setup.folder)
    if not setup.dry_run:
        setup.claim(policy)
    rows = Rows(
        train=[*chain(*train)], held_out=[*chain(*held_out)], stream=setup.stream(train), batch_size=config.batch_size
    )
    size = len(rows.train)
    run = setup.run(worker, setup.tracker(size), size, bool(rows.held_out), resume_from)
    run.given = given(policy, train, worker.objective, setup.crew.ranks)
    return Loop(rows=rows, worker=worker, run=run, at_start=config.validation.at_start)


def worker_of(config: schema.Stage, policy: Policy, crew: RankGroup, folder: Path) -> RowsWorker:
    learner, objective = COMMANDS[type(config)].make(config, policy, crew)
    return RowsWorker(**worker_fields(config, crew.ranks, folder), learner=learner, crew=crew, objective=objective)


def examples(
    config: schema.Stage, policy: Policy, setup: Setup[schema.Stage]
) -> tuple[Sequence[Examples], Sequence[Examples]]:
    """The rows of each source, of training and held out."""
    given, limit = setup.given, longest(config, policy)
    load = partial(load_examples, config.data, chat=policy.chat, limit=limit)
    train, held_out = load("train", given=given.train), load("validation", given=given.validation)
    if config.data.validation_split > 0 and not held_out:
        return split_validation(train, config.data.validation_split, config.seed, key=lambda e: e.key)
    return train, held_out


def longest(config: schema.Stage, policy: Policy) -> int:
    """Most tokens of a sequence."""
    return min(config.model.max_length or policy.context, policy.context)


def check_lengths(config: schema.Stage, rows: Sequence[Any]) -> None:
    """A micro-batch must hold the longest row; what is compared stays in one micro-batch. Raises `BirlError`."""
    what, room = COMMANDS[type(config)].row, max(e.room for e in rows)
    needed = room - 1 if isinstance(config, schema.SFT) else room
    if needed > config.capacity:
        raise BirlError(
            f"{capacity_setting(config)} cannot hold the longest {what}, {needed} tokens. Set "
            f"{needed_setting(config, needed)}, or a smaller model.max_length, beyond which rows are dropped."
        )


def likelihood(config: schema.SFT, policy: Policy, crew: RankGroup) -> tuple[Learner, Objective]:
    teacher, loss = distilled(config, policy, crew.ranks), negative_log_likelihood
    if teacher is not None:
        loss = partial(imitation, nll_coef=config.distill.nll_coef)
    objective = Likelihood(pack=packer_of(config, policy.pair_cost), denominator=config.denominator, loss=loss)
    return make_learner(config, policy.model, crew.ranks, teacher=teacher), objective


def ranking(config: schema.RM, policy: Policy, crew: RankGroup) -> tuple[Learner, Objective]:
    add_score_head(policy.model, config.seed)
    objective = Ranking(pack=packer_of(config, policy.pair_cost), centering=config.ranking.centering)
    return make_learner(config, policy.model, crew.ranks), objective


def preferences(config: schema.DPO, policy: Policy, crew: RankGroup) -> tuple[Learner, Objective]:
    keys = config.preference
    row = preference.PREFERENCE[keys.loss]
    kind = "none" if row.mean else keys.reference
    frozen = None
    if kind == "live":
        frozen = Learner(deepcopy(policy.model), dtype=DTYPES[config.model.dtype], trainable=False, ranks=crew.ranks)
    trained = make_learner(config, policy.model, crew.ranks)
    if row.alone:
        weights = {"desirable_weight": keys.desirable_weight, "undesirable_weight": keys.undesirable_weight}
        compare = partial(row.loss, beta=keys.beta, **weights)
    else:
        compare = part("preference.loss", keys.loss, {keys.loss: row.loss}, keys, (), ()).bound({})
    pack = packer_of(config, policy.pair_cost)
    objective = Preferences(
        pack=pack,
        name=keys.loss,
        alone=row.alone,
        mean=row.mean,
        compare=compare,
        beta=keys.beta,
        nll_coef=keys.nll_coef if row.nll is None else row.nll,
        reference=Reference(
            pack=pack,
            now=crew.each(trained.forward),
            first=None if frozen is None else crew.each(frozen.forward),
            weights=crew.everywhere(lambda _: weights_of(trained.model)),
        ),
        precompute=config.batch_size if kind == "precomputed" else 0,
        limit=longest(config, policy),
    )
    return trained, objective


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """`make`: the model as it is trained, and what it minimises; `row`: what a row is called."""

    make: Callable[[Any, Policy, RankGroup], tuple[Learner, Objective]]
    row: str


COMMANDS: dict[type[schema.Stage], Command] = {
    schema.SFT: Command(make=likelihood, row="row"),
    schema.RM: Command(make=ranking, row="pair (both answers together)"),
    schema.DPO: Command(make=preferences, row="pair (both answers together)"),
}
