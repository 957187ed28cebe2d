"""`birl eval`: set up engine, tasks and rewards, run the evaluation, and print the results."""

import asyncio
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import isnan, nan
from pathlib import Path

from birl.algorithms.uncertainty import interval
from birl.cli import output
from birl.config import schema
from birl.config.decided import compares
from birl.config.file import flatten
from birl.data.tasks import check_answers, load_tasks
from birl.engine.engine import EmbeddedEngine
from birl.engine.open import check_cache, open_engine
from birl.engines.kinds import check_engine, shares
from birl.engines.servers import Servers, Wanted, open_servers
from birl.envs.open import check_world, open_world
from birl.errors import BirlError, innermost
from birl.foreign import interrupting
from birl.learner.policy import DTYPES, Policy, Reader, load_policy, load_reader
from birl.learner.rewards import check_served, make_rewards, started
from birl.models.device import choose
from birl.models.digests import digests, vocabulary_digest, whole
from birl.models.load import cast
from birl.parallel.machine import compute_thread
from birl.rollout.evaluate import (
    Baseline,
    EvaluationPlan,
    by_prompt,
    data_digest,
    evaluate,
    plan,
    right_among,
    versions_of,
)
from birl.rollout.failures import ALIKE, Start, reasons
from birl.rollout.group import Rollout
from birl.rollout.records import answers
from birl.rollout.scorer import scorer
from birl.rollout.tasks import limits_in, longest_prompt, own_rows, reading, tell_plain
from birl.server.gateway import Gateway
from birl.track.console import Terminal
from birl.track.progress import source
from birl.track.units import counted
from birl.types import Group
from birl.visible import visible

EVAL_TOKENS = 512  # longest answer in `birl eval` if validation.max_tokens is 0


@dataclass(slots=True, kw_only=True)
class Evaluation:
    """`weights`: digest of the evaluated weights, empty if a server has none; `data`: digest of the questions."""

    plan: EvaluationPlan
    rollout: Rollout
    engine: EmbeddedEngine | Servers
    opened: AsyncExitStack
    weights: str
    data: str

    async def close(self) -> None:
        await self.opened.aclose()


async def evaluation(config: schema.Eval, compute: Executor) -> Evaluation:
    """Build the evaluation. With servers only the tokenizer is loaded in this process."""
    check_world(config.env)
    check_engine(config.engine, trains=False)
    shares(config.engine, config.model.device, 0)
    in_thread = partial(asyncio.get_running_loop().run_in_executor, compute)
    async with AsyncExitStack() as opened:
        rewards = make_rewards(config, compute)
        await check_served(config, rewards)
        starting = await started(rewards, opened)
        load = partial(load_policy, compute=compute) if config.engine.kind == "embedded" else load_reader
        model: Policy | Reader = await in_thread(load, config.model)
        world = await open_world(config.env, model.chat.text)
        opened.push_async_callback(world.close)
        rows = own_rows(config, world, "validation")
        of = {"hosts": config.model.picture_hosts, **reading(world)}
        tasks = load_tasks(config.data, "validation", chat=model.chat.has_template, given=rows, **of)
        for source in tasks:
            check_answers(source.rows, source.reader.answer, compares(config))
        questions = [t[i] for t in tasks for i in range(len(t))]
        tell_plain(model.chat, questions)
        context = min(config.model.max_length or model.context, model.context)
        answer = config.validation.max_tokens or EVAL_TOKENS
        asked = (context - answer if world.turns else longest_prompt(questions, model.chat, context), answer)
        if isinstance(model, Policy):
            engine = await in_thread(embedded, config, model, context, asked)
            opened.push_async_callback(engine.close)
            result = await in_thread(lambda: whole(digests({n: p.data for n, p in model.model.named_parameters()})))
        else:
            engine, result = await served(config, model, context, asked, opened)
        if config.env.sampling == "agent" and not world.agent:
            raise BirlError(f"env.sampling=agent: env.kind={world.kind} has no client that could set parameters.")
        gateway = Gateway(model.chat, config.env.sampling) if world.agent else None
        if gateway is not None:
            await gateway.start()
            opened.push_async_callback(gateway.close)
        await starting
        first = frozenset(question.id for question in questions[:ALIKE])
        rollout = Rollout(
            engine=engine,
            chat=model.chat,
            open_env=world.open,
            score=scorer(rewards),
            limits=limits_in(world, config.env, tokens=context),
            seed=config.seed,
            gateway=gateway,
            saw=Start(rows=first, tasks=len(first)).saw,
        )
        return Evaluation(
            plan=plan(questions, config.validation, EVAL_TOKENS),
            rollout=rollout,
            engine=engine,
            weights=result,
            data=data_digest(questions),
            opened=opened.pop_all(),
        )


def embedded(config: schema.Eval, policy: Policy, context: int, asked: tuple[int, int]) -> EmbeddedEngine:
    cast(policy.model, DTYPES[config.model.dtype]).requires_grad_(False)
    engine = open_engine(policy, config.engine, context, lambda: 0, min(sum(asked), context))
    check_cache(config.engine, engine, *asked)
    return engine


async def served(
    config: schema.Eval, reader: Reader, context: int, asked: tuple[int, int], opened: AsyncExitStack
) -> tuple[Servers, str]:
    """The servers, and the digest of their weights if all agree. Their logs are removed when `opened` is closed."""
    logs = opened.enter_context(tempfile.TemporaryDirectory(prefix="birl-engines-"))
    servers = await open_servers(
        config.engine,
        Wanted(
            folder=reader.folder,
            dtype=config.model.dtype,
            device=config.model.device,
            context=context,
            longest=min(sum(asked), context),
            kv_cache_gb=config.engine.kv_cache_gb or 1.0,
            end_ids=reader.chat.end_ids,
            logs=Path(logs),
            pictures=reader.chat.pictures,
            vocabulary_digest=vocabulary_digest(reader.chat.tokenizer.get_vocab(), reader.chat.end_ids),
        ),
    )
    opened.push_async_callback(servers.close)
    infos = {remote.address: await remote.info() for remote in servers.remotes.values()}
    for address, info in infos.items() if config.engine.attach else ():
        print(f"{address} has version {info.version} of {info.model}.", flush=True)
    if len({info.digest for info in infos.values()}) > 1:
        raise BirlError(
            "engine.attach: the servers hold different weights, so the result would mix models. Evaluate one at a time."
        )
    return servers, next(info.digest for info in infos.values())


def run(config: schema.Eval) -> None:
    """Run `birl eval`."""
    here = config.engine.kind == "embedded" or "model" in schema.reward_functions(config)
    with compute_thread(config.threads, choose(config.model.device) if here else None) as compute:
        try:
            asyncio.run(_run(config, compute))
        except BaseExceptionGroup as group:
            raise innermost(group) from None


async def _run(config: schema.Eval, compute: Executor) -> None:
    baseline = Baseline.read(config.baseline) if config.baseline else None
    parts = await evaluation(config, compute)
    if warning := parts.plan.greedy_repeats:
        print(f"birl: warning: {warning}", file=sys.stderr)
    asked, longest = counted(len(parts.plan.tasks), "question"), parts.plan.params.max_tokens
    print(f"birl: {asked}, answers of at most {longest} tokens ...", file=sys.stderr)
    try:
        with interrupting(config.env.timeout):
            metrics, groups = await evaluate(parts.plan, parts.rollout)
    finally:
        await parts.close()
    check_failures(groups)
    check_versions(groups)
    values = by_prompt(groups, parts.plan.k, parts.plan.threshold)
    bounds = {name: interval(each) for name, each in values.items()}
    each = [replace(g, trajectories=(one,)) for g in groups for one in g.trajectories]
    records = answers(each, parts.rollout) if baseline or config.output else []
    changes = baseline.against(parts.data, records) if baseline else []
    if config.output:
        about = {"model": config.model.path, "weights": parts.weights, "data": parts.data, "seed": config.seed}
        about |= {"n": parts.plan.samples, "config": flatten(config), "tokens": tokens(groups)}
        about |= {"metrics": metrics, "intervals": bounds, "changes": [asdict(change) for change in changes]}
        output.write(config.output, {**about, "answers": records})
    show(metrics, bounds)
    print("Tokens: {prompts:,} of prompts, {answers:,} of answers.".format(**tokens(groups)))
    if rule := ruled(groups, config.validation.threshold):
        print(rule)
    if changes:
        print(f"Against {visible(config.baseline)}:", *changes, sep="\n  ")
    if config.output:
        print(f"Written to {config.output}")


def check_failures(groups: Sequence[Group]) -> None:
    """Report why answers have no score. Raises `BirlError` if none has one."""
    episodes = [(g.task, t) for g in groups for t in g.trajectories]
    failed = [(task, t) for task, t in episodes if not t.outcome.scored]
    if failed:
        text = (
            f"{len(failed)} of {len(episodes)} answers could not be scored. Most frequent reasons:\n{reasons(failed)}"
        )
        if len(failed) == len(episodes):
            raise BirlError(text)
        print(visible(text))


def check_versions(groups: Sequence[Group]) -> None:
    result = versions_of(groups)
    if len(result) > 1:
        raise BirlError(
            f"engine.attach: the weights changed meanwhile (answers come from the versions "
            f"{', '.join(map(str, sorted(result)))}), so the result would mix models. Evaluate when the training "
            "is over, or a checkpoint of it."
        )


def tokens(groups: Sequence[Group]) -> dict[str, int]:
    """Number of tokens, also of failed answers; a prompt counts for each answer, a conversation for each turn."""
    turns = [turn for g in groups for t in g.trajectories for turn in t.turns]
    return {"prompts": sum(len(t.prompt) for t in turns), "answers": sum(len(t.completion.tokens) for t in turns)}


def ruled(groups: Sequence[Group], threshold: float) -> str:
    """Text: the score from which on an answer is right; empty if that is obvious."""
    if threshold:
        return f"Right: a score of at least {threshold:g} (validation.threshold)."
    if isnan(right_among(groups, threshold)):
        return (
            "Scores are not only 0 and 1, so there is no pass@k; with validation.threshold=0.5, scores of at least 0.5 "
            "would count as right."
        )
    return ""


def show(metrics: Mapping[str, float], bounds: Mapping[str, tuple[float, float]]) -> None:
    """Print metrics as a table, with 95 % intervals. Names of sources are wrapped, never cut."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("source", overflow="fold")
    for head in ("n", "metric", "value", "95 %", "mean\nscore", "mean\ntokens", "truncated", "failed"):
        table.add_column(head, no_wrap=True, justify="left" if head == "metric" else "right")
    for name in dict.fromkeys(map(source, metrics)):
        own = {key.rpartition("/")[2]: value for key, value in metrics.items() if source(key) == name}
        rest = (f"{own['score']:.3f}", f"{own['length']:.1f}", f"{own['truncated']:.0f}", f"{own['failed']:.0f}")
        shown = [key for key in own if key.startswith("pass@")]
        if own.get("pass@1") != own["score"]:  # else its row has both
            shown.insert(0, "score")
        for metric in shown:
            low, high = bounds.get(f"validation/{name}/{metric}", (nan, nan))
            between = "" if isnan(low) else f"{low:.3f} - {high:.3f}"
            table.add_row(visible(name), f"{own['n']:.0f}", metric, f"{own[metric]:.3f}", between, *rest)
    Terminal(width=None if sys.stdout.isatty() else 10_000).print(table)
