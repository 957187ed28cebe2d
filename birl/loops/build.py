"""Configuration -> objects. The only place that turns names into things; everything below takes values."""

import asyncio
import gc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from birl.config import schema
from birl.config.load import flatten, run_folder
from birl.config.rules_algorithm import CRITIC, remembers
from birl.config.rules_sandbox import at_once
from birl.data.tasks import Tasks
from birl.engine.engine import Counters, EmbeddedEngine
from birl.envs.open import check_world, open_world
from birl.errors import BirlError
from birl.learner.learner import Learner
from birl.learner.lora import Lora
from birl.loops.credit import Credit
from birl.loops.custom import part
from birl.loops.engines import Servers, open_servers, sender, wanted
from birl.loops.evaluate import Plan, data_digest, plan
from birl.loops.objective import ALL_SURROGATES, TENSORS, Objective
from birl.loops.policy import DTYPES, Policy, check_cache, load_policy
from birl.loops.run_folder import claim, find_checkpoint
from birl.loops.scorer import RewardModel
from birl.loops.tasks import check_lengths, lengths, load_data, report_data, stream, total_steps
from birl.loops.teacher import ServedTeacher
from birl.models.forward import head
from birl.models.heads import add_score_head
from birl.models.load import load_model, load_reward_model, load_tokenizer, resolve, score_weight
from birl.rewards.judge import read_template
from birl.rewards.score import Rewards
from birl.rollout.assemble import Usage
from birl.rollout.group import Rollout, Scorer
from birl.rollout.session import Limits
from birl.seeds import derive_seed
from birl.serve.gateway import Gateway
from birl.text.chat import Chat
from birl.track.tracker import Tracker
from birl.types import Sample, SamplingParams, Task
from birl.weights.publish import Memory, Publisher


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a Python program hands over instead of naming it: see `birl.Trainer`."""

    rewards: Sequence[Callable[..., Any] | str] = ()
    env: Any = None  # a class or function, as env.kind names one
    train: Any = None  # rows: a datasets.Dataset or a list of dicts
    validation: Any = None


@dataclass(kw_only=True)
class Parts:
    """All objects of one training run."""

    config: schema.RL
    run: Path
    policy: Policy
    learner: Learner
    reference: Learner | None
    critic: Learner | None
    objective: Objective
    credit: Credit
    engine: EmbeddedEngine | Servers
    rollout: Rollout
    params: SamplingParams
    train: list[Tasks]
    plan_validation: Plan | None
    tracker: Tracker
    publisher: Publisher
    resume_from: Path | None
    total_steps: int | None
    counted: Counters = field(default_factory=Counters)
    opened: AsyncExitStack = field(default_factory=AsyncExitStack)

    @property
    def usage(self) -> Usage:
        return Usage(failed=self.config.rollout.failed, truncated=self.config.rollout.truncated)

    @property
    def chat(self) -> Chat:
        return self.policy.chat

    @property
    def compute(self) -> Executor:
        return self.policy.compute

    @property
    def total_updates(self) -> int | None:
        return (
            self.total_steps
            and self.total_steps * self.config.algorithm.updates_per_batch * self.config.algorithm.passes
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        found = self.learner.tensors()
        if self.critic is not None:
            found |= {f"critic.{name}": tensor for name, tensor in self.critic.tensors().items()}
        return found

    def loaded(self, version: int) -> None:
        self.learner.loaded(version)
        if self.critic is not None:
            self.critic.loaded(version)

    def has_gradient(self, sample: Sample) -> bool:
        """Samples that have none need not go through the model."""
        if self.config.debug.only_rollout:
            return False
        keys = self.config.algorithm
        ranked = keys.entropy_control != "none"  # all tokens of the step are compared
        everything = ranked or keys.advantage in CRITIC or keys.entropy_coef > 0 or self.objective.needs_reference()
        own = sample.advantage
        return everything or (any(own) if isinstance(own, tuple) else own != 0)

    @cached_property
    def validation_digest(self) -> str:
        """Of the questions that are validated on."""
        return data_digest(self.plan_validation.tasks if self.plan_validation else ())

    @property
    def validation_rollout(self) -> Rollout:
        """The same but for its seed: validation draws other numbers than training."""
        return replace(self.rollout, seed=derive_seed(self.config.seed, -1))

    def stream(self, position: int) -> Iterator[Task]:
        return stream(self.config, self.train, position)

    def take_counters(self) -> Counters:
        """What the engine did since the last call."""
        now = self.engine.counters
        taken = Counters(*(getattr(now, f.name) - getattr(self.counted, f.name) for f in fields(Counters)))
        self.counted = replace(now)
        return taken

    async def close(self) -> None:
        await self.opened.aclose()
        self.publisher.close()
        self.tracker.close()


async def training(config: schema.RL, choices: dict[str, str], given: Given, dry_run: bool, compute: Executor) -> Parts:
    """Load and check everything, cheapest first. Rewards start their workers while the model loads."""
    run = Path(run_folder(config, choices))
    resume_from = find_checkpoint(config, run)
    check_world(config.env, given.env)
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as opened:
        rewards = make_rewards(config, compute, given.rewards)
        starting = await started(rewards, opened)
        policy = await loop.run_in_executor(compute, load_policy, config.model, compute)
        context = min(config.model.max_length or policy.context, policy.context)
        world = await open_world(config.env, policy.chat.text, given.env)
        opened.push_async_callback(world.close)
        train, validation = load_data(config, world, policy.chat, context, given.train, given.validation)
        if config.data.train or given.train is not None:
            report_data(train, validation)
        check_lengths(config, world, train, policy.chat, context)
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
        rollout = partial(Rollout, chat=policy.chat, open_env=world.open, score=scorer(rewards), gateway=gateway)
        ready = partial(
            assembled, config, policy, context, rewards, rollout, train, validation, run, resume_from, dry_run, asked,
            servers,
        )  # fmt: skip
        parts = await loop.run_in_executor(compute, ready)
        if servers is None:
            opened.push_async_callback(parts.engine.close)
        gc.freeze()  # the collector need not look through torch and the model again: a quarter of a second each time
        opened.callback(gc.unfreeze)
        parts.opened = opened.pop_all()
        return parts


async def started(rewards: Rewards | None, opened: AsyncExitStack) -> asyncio.Future[None]:
    """Their start, on its way."""
    if rewards is None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ready.set_result(None)
        return ready
    starting = asyncio.create_task(rewards.start())
    opened.push_async_callback(rewards.close)
    opened.callback(starting.cancel)
    return starting


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
) -> Parts:
    """Everything that needs the model and the data; claims the run folder when nothing is left that could be wrong."""
    learner, objective, credit, critic = models(config, policy, rewards)
    longest = min(max(map(sum, asked)), context)
    engine = servers or policy.engine(config.engine, context, lambda: learner.version, longest)
    if isinstance(engine, EmbeddedEngine):
        for prompt, answer in asked:
            check_cache(config.engine, engine, prompt, answer)
    limits = Limits(timeout=config.env.timeout, turns=config.env.max_turns, tokens=context)
    total = total_steps(config, train)
    if not dry_run:
        claim(run, config, policy)
    tracker = Tracker(run, config.track, title=run.name, total_steps=total, config=flatten(config))
    publisher = Memory() if servers is None else sender(config, policy, learner, servers, train, run, tracker.message)
    return Parts(
        config=config,
        run=run,
        policy=policy,
        learner=learner,
        reference=objective.reference,
        critic=critic,
        objective=objective,
        credit=credit,
        engine=engine,
        rollout=rollout(engine=engine, limits=limits, seed=config.seed),
        params=sampling(config.rollout),
        train=train,
        plan_validation=plan(validation, config.validation, config.rollout.max_tokens, config.rollout.stop)
        if validation
        else None,
        tracker=tracker,
        publisher=publisher,
        resume_from=resume_from,
        total_steps=total,
    )


def models(
    config: schema.RL, policy: Policy, rewards: Rewards | None
) -> tuple[Learner, Objective, Credit, Learner | None]:
    """The policy's learner, what it minimises, how its answers are judged; copies of the first weights come first."""
    keys, own = config.algorithm, config.algorithm.advantage in CRITIC and not config.critic.shared
    surrogate = part("algorithm.surrogate", keys.surrogate, ALL_SURROGATES, keys, keys.surrogate_args, TENSORS)
    frozen = partial(Learner, dtype=DTYPES[config.model.dtype], temperature=config.rollout.temperature, trainable=False)
    reference = teacher = critic = None
    if keys.kl_coef > 0 or "ref_logp" in surrogate.tensors:
        reference = frozen(deepcopy(policy.model))
    if keys.teacher.startswith(("http://", "https://")):
        teacher = ServedTeacher(keys.teacher)
    elif keys.teacher:
        teacher = frozen(other_model(config, keys.teacher, policy, "algorithm.teacher"))
    if own:
        path = config.critic.path
        body = other_model(config, path, policy, "critic.path") if path else deepcopy(policy.model)
        add_score_head(body, config.seed)
        critic = make_learner(config, body)
    elif keys.advantage in CRITIC:
        add_score_head(policy.model, config.seed, "value")
    learner = make_learner(config, policy.model)
    objective = Objective(config=config, learner=learner, reference=reference, surrogate=surrogate)
    says = critic.forward if critic is not None else learner.values if keys.advantage in CRITIC else None
    usage = Usage(failed=config.rollout.failed, truncated=config.rollout.truncated)
    credit = Credit(
        config=config,
        usage=usage,
        reference=reference,
        critic=says,
        teacher=teacher,
        learner=learner if remembers(config) else None,
        weights=rewards.weights if rewards is not None else (),
    )
    return learner, objective, credit, critic


def other_model(config: schema.RL, path: str, policy: Policy, key: str) -> nn.Module:
    """A model that reads the policy's own tokens."""
    folder = resolve(path, key=key)
    tokenizer = load_tokenizer(folder)
    if tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise BirlError(
            f"{key}={path}: has another vocabulary than model.path={config.model.path}, so its tokens mean something "
            "else. Take a model of the same family."
        )
    scores = key == "critic.path" and any(score_weight(file) is not None for file in folder.glob("*.safetensors"))
    load = load_reward_model if scores else load_model
    return load(folder).to(head(policy.model).weight.device)


def check_device(config: schema.RL | schema.Stage, device: torch.device) -> None:
    if config.optimizer.offload == "cpu" and device.type == "cpu":
        raise BirlError(
            "optimizer.offload=cpu: the weights are in CPU memory already, so there is nothing to gain. Set "
            "optimizer.offload=none."
        )


def make_learner(config: schema.RL | schema.Stage, model: nn.Module) -> Learner:
    """The learner that is trained. Its log-probs are those of the temperature that sampled, where something did."""
    optimizer = config.optimizer
    check_device(config, head(model).weight.device)
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
    )


def lora_of(config: schema.RL | schema.Stage) -> Lora | None:
    lora = config.lora
    if lora.rank == 0:
        return None
    return Lora(rank=lora.rank, alpha=lora.alpha, targets=tuple(lora.targets), dora=lora.dora, seed=config.seed)


def make_rewards(
    config: schema.RL | schema.Eval, compute: Executor, given: Sequence[Callable[..., Any] | str] = ()
) -> Rewards | None:
    """None where the environment alone rewards. A reward model is loaded here; where it is an address, a worker asks
    there."""
    keys = config.reward
    functions: list[Callable[..., Any] | str] = list(given) or list(schema.reward_functions(config))
    if not functions:
        return None
    served = keys.model.startswith(("http://", "https://"))
    if "model" in functions:
        judge = "endpoint" if served else compute.submit(RewardModel, keys.model, config.model, compute).result()
        functions[functions.index("model")] = judge
    return Rewards(
        functions,
        weights=keys.weights,
        timeout=keys.timeout,
        workers=keys.workers,
        options={
            "format_pattern": keys.format_pattern,
            "length_target": keys.length_target,
            "address": keys.model,
            "endpoint_concurrency": keys.concurrency,
            "endpoint_timeout": keys.timeout,
            "judge": keys.judge,
            "judge_template": read_template(keys.judge_prompt),
            "judge_tokens": keys.judge_tokens,
            "judge_cache": keys.judge_cache,
            "judge_concurrency": keys.concurrency,
            "judge_timeout": keys.timeout,
            "code_partial": keys.code_partial,
            "sandbox": {**vars(config.sandbox), "workers": at_once(config)},
        },
    )


def scorer(rewards: Rewards | None) -> Scorer | None:
    """Reward functions see the prompt as the data has it, the completions as text, and the row's columns, once for
    each."""
    if rewards is None:
        return None

    async def score(task: Task, completions: list[str]) -> Sequence[Any]:
        n = len(completions)
        prompt = (
            task.prompt
            if isinstance(task.prompt, str)
            else [{"role": m.role, "content": m.content} for m in task.prompt]
        )
        columns = {name: [value] * n for name, value in task.columns.items()}
        return await rewards.score([prompt] * n, completions, columns, [task.answer] * n)

    return score


def sampling(config: schema.Rollout) -> SamplingParams:
    return SamplingParams(
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        stop=tuple(config.stop),
    )
