"""Loads the tasks of a run from data files or the environment, and checks that they fit the model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from birl.config import schema
from birl.config.check import capacity_setting, needed_setting
from birl.config.decided import check_warmup, compares
from birl.data.tasks import SOURCES, Tasks, check_answers, filter_by_length, load_tasks, overlap, split_validation
from birl.errors import BirlError, placed
from birl.named import Given
from birl.rollout.session import Limits
from birl.text.bounds import cannot_fit
from birl.types import Task

if TYPE_CHECKING:
    from birl.envs.open import World
    from birl.learner.policy import Policy
    from birl.text.chat import Chat


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Tasks of a run for training and validation. `context`: longest sequence [tokens]; `asked`: longest prompt and
    answer of training, and of validation if there is one [tokens]."""

    context: int
    train: Sequence[Tasks]
    validation: Sequence[Task]
    asked: Sequence[tuple[int, int]]


def load_rows(config: schema.RL, world: "World", policy: "Policy", given: Given) -> Loaded:
    """Load the rows and check them against the model and the environment, with warnings. Raises `BirlError`."""
    context = context_of(config, world, policy.context)
    train, validation = load_data(config, world, policy.chat, context, given.train, given.validation)
    if config.data.train or given.train is not None:
        if shared := overlap([t[i] for t in train for i in range(len(t))], validation) if validation else 0:
            print(f"Warning: {shared} of {len(validation)} validation prompts are training prompts as well.")
        tell_plain(policy.chat, [tasks[0] for tasks in train])
    check_warmup(config, sum(map(len, train)))
    check_lengths(config, world, train, policy.chat)
    asked = lengths(config, world, policy, train, validation, context)
    return Loaded(context=context, train=train, validation=validation, asked=asked)


def load_data(
    config: schema.RL, world: "World", chat: "Chat", context: int, given: Any = None, given_validation: Any = None
) -> tuple[list[Tasks], list[Task]]:
    """Load training sources and validation tasks; prompts that leave no room for an answer are dropped and counted.
    `given` rows replace data.train and data.validation."""
    data = config.data
    of = {"chat": chat.has_template, "hosts": config.model.picture_hosts, **reading(world)}
    train = load_tasks(data, "train", given=own_rows(config, world, "train", given), **of)
    rows = own_rows(config, world, "validation", given_validation)
    validation = load_tasks(data, "validation", given=rows, **of)
    for tasks in (*train, *validation):
        if section := world.section:
            for task in tasks:
                section(task)  # raises for a row that names no environment
        check_answers(tasks.rows, tasks.reader.answer, compares(config))
    if data.validation_split > 0 and not validation:
        train, validation = split_validation(train, data.validation_split, config.seed)
    limit = data.max_prompt_tokens or context - config.rollout.max_tokens
    if limit <= 0:
        raise BirlError(
            f"rollout.max_tokens={config.rollout.max_tokens} leaves no room for a prompt in the context of {context} "
            "tokens. Lower it."
        )
    fitting: list[Tasks] = []
    for tasks in train:
        kept, dropped = filter_by_length(tasks, lambda t: prompt_tokens(chat, t, limit), limit)
        if dropped:
            print(f"{tasks.name}: dropped {dropped} of {len(tasks)} rows whose prompt has more than {limit} tokens.")
        if len(kept) == 0:
            raise BirlError(
                f"{tasks.name}: every prompt has more than {limit} tokens. "
                + (
                    "Raise data.max_prompt_tokens."
                    if data.max_prompt_tokens
                    else f"The context of {context} tokens has no room for longer prompts with rollout.max_tokens="
                    f"{config.rollout.max_tokens}: lower that, shorten the prompts or use a model with a longer one."
                )
            )
        fitting.append(kept)
    held_out = [t for tasks in validation for t in (tasks[i] for i in range(len(tasks)))]
    return fitting, held_out


def reading(world: "World") -> dict[str, Any]:
    """Options for reading the rows of a world: keys of `birl.data.tasks.Reader`."""
    sources = SOURCES if world.section is None else (*SOURCES, "env")  # names one of several environments
    return {"alone": world.kind == "single_turn", "sources": sources}


def prompt_tokens(chat: "Chat", task: Task, limit: int) -> int:
    """Length of the prompt [tokens]; one that must exceed `limit` is not tokenized."""
    return limit + 1 if cannot_fit(task.prompt, limit) else len(chat.render(task.prompt))


def longest_prompt(tasks: Sequence[Task], chat: "Chat", context: int) -> int:
    """Longest prompt [tokens]; warns of prompts that leave no room for an answer."""
    lengths = []
    for task in tasks:
        with placed(task.place):
            lengths.append(prompt_tokens(chat, task, context))
    if full := sum(n >= context for n in lengths):
        print(f"Warning: {full} of {len(lengths)} prompts fill the context of {context} tokens: no room for answers.")
    return max(lengths)


def own_rows(config: schema.RL | schema.Eval, world: "World", which: str, given: Any = None) -> Any:
    """The environment's own tasks, if no data is named. None: use those of the data."""
    data = config.data
    named = data.train if which == "train" else data.validation or data.validation_split
    if given is not None or named:
        return given
    rows = world.rows(which) if world.rows is not None else []
    if rows:
        return rows
    if which == "train" or isinstance(config, schema.Eval):
        raise BirlError(
            f"data.{which} is empty, and env.kind={world.kind} has no tasks of its own: name a file, as in "
            f"data.{which}=my.jsonl."
        )
    return None


def tell_plain(chat: "Chat", tasks: Sequence[Task]) -> None:
    """Warn that a model without a template gets plain text: nothing else reports it."""
    if not chat.has_template and any(isinstance(task.prompt, str) for task in tasks):
        print(
            "Warning: the model has no chat template, so prompts are raw text without roles. Set "
            "model.chat_template=hermes, or a Jinja file.",
            flush=True,
        )


def context_of(config: schema.RL, world: "World", limit: int) -> int:
    """Longest sequence [tokens] of a run whose model has the context `limit`. By default, an episode of several turns
    is limited to the learner's capacity: it would fill any context."""
    asked = config.model.max_length
    if world.turns and not asked and config.capacity < limit:
        print(
            f"Episodes have at most {config.capacity} tokens ({capacity_setting(config)}); set "
            "model.max_length=N for another limit.",
            flush=True,
        )
        return config.capacity
    return min(asked or limit, limit)


def limits_in(world: "World", env: schema.Env, tokens: int) -> Limits | Callable[[Task], Limits]:
    """Limits of an episode, or a function of its task; `tokens` of a conversation."""
    section = world.section
    return limits_of(env, tokens) if section is None else lambda task: limits_of(section(task), tokens)


def limits_of(env: schema.Env, tokens: int) -> Limits:
    return Limits(timeout=env.timeout, turns=env.max_turns, tokens=tokens, cut_ends=env.cut_turn == "end")


def check_lengths(config: schema.RL, world: "World", train: Sequence[Tasks], chat: "Chat") -> None:
    """Check that every sample fits into one micro-batch; better now than at step 300."""
    if world.turns:  # `context_of`
        return
    longest = max(len(chat.render(t[i].prompt)) for t in train for i in range(len(t)))
    need = longest + config.rollout.max_tokens
    if need > config.capacity:
        raise BirlError(
            f"{capacity_setting(config)} cannot hold the longest possible sample, {need} tokens: a prompt of {longest} "
            f"and rollout.max_tokens={config.rollout.max_tokens}. Set {needed_setting(config, need)}, or lower "
            "data.max_prompt_tokens or rollout.max_tokens."
        )


def lengths(
    config: schema.RL,
    world: "World",
    policy: "Policy",
    train: Sequence[Tasks],
    validation: Sequence[Task],
    context: int,
) -> list[tuple[int, int]]:
    """Longest prompt and answer of training, and of validation if there is one [tokens]."""
    if world.turns:
        return [(context - config.rollout.max_tokens, config.rollout.max_tokens)]
    everything = [t[i] for t in train for i in range(len(t))]
    asked = [(longest_prompt(everything, policy.chat, context), config.rollout.max_tokens)]
    if validation:
        answer = config.validation.max_tokens or config.rollout.max_tokens
        asked.append((longest_prompt(validation, policy.chat, context), answer))
    return asked
