"""A model that can be sampled from: `birl rl`, `eval` and `chat` all begin with one."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from birl.config import schema
from birl.engine.engine import EmbeddedEngine
from birl.engine.pages import pages_for
from birl.errors import BirlError
from birl.kernels import PAGE
from birl.learner.export import resolved
from birl.models.device import choose
from birl.models.forward import head, verify
from birl.models.load import (
    check_vocabulary,
    context_limit,
    end_ids,
    load_model,
    load_tokenizer,
    skeleton,
)
from birl.models.slices import sketched, verify_small
from birl.models.slots import page_bytes
from birl.parallel.machine import free_memory
from birl.parallel.ranks import Ranks
from birl.planning.shape import Shape
from birl.text.bounds import cannot_fit
from birl.text.chat import PROBE, Chat
from birl.types import Task

SHARE = 0.5  # of the free memory, for keys and values
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(slots=True, kw_only=True)
class Policy:
    """A model that can be sampled from, and the thread it computes on."""

    folder: Path
    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    chat: Chat
    compute: Executor

    @property
    def context(self) -> int:
        return context_limit(self.model)

    @property
    def pair_cost(self) -> float:
        """Of attention to one token, by that of a token's products with weights."""
        config: Any = self.model.config
        return Shape.of(config.to_dict() | {name: getattr(config, name) for name in config.attribute_map}).pair_cost

    def engine(
        self,
        config: schema.Generation,
        context: int,
        version: Callable[[], int] | None,
        longest: int | None = None,
        routes: bool = False,
        among: int = 1,
    ) -> EmbeddedEngine:
        """`version` None: the engine has weights of its own. `longest`: no sequence will be longer [tokens]; `context`
        where it is not known. `routes`: it says which experts computed a token. `among`: so many share the memory."""
        return EmbeddedEngine(
            self.model,
            self.tokenizer,
            end_ids=end_ids(self.model, self.tokenizer),
            context=context,
            compute=self.compute,
            version=version,
            recompute_kv=config.recompute_kv,
            max_batch=config.max_batch,
            kv_cache_gb=config.kv_cache_gb
            or cache_bytes(self.model, config.max_batch, longest or context, among) / 2**30,
            draft_rows=config.draft_rows,
            routes=routes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """What is needed to talk to a model that is somewhere else."""

    folder: Path
    chat: Chat
    context: int


def load_reader(config: schema.Model) -> Reader:
    """A model's tokenizer and limits, without its weights."""
    folder = resolved(config.path, weights=False)
    chat = Chat(load_tokenizer(folder, config.chat_template), config.tool_format)
    model = skeleton(folder)
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(folder)  # pyright: ignore
    chat.end_ids = end_ids(model, chat.tokenizer)
    return Reader(folder=folder, chat=chat, context=context_limit(model))


def load_policy(config: schema.Model, compute: Executor, ranks: Ranks | None = None) -> Policy:
    """The model is verified in float32 on the device that it will run on, so with that device's kernels. Where `ranks`
    will have parts of it, it gets no weights yet (`models/slices.py`), and a small one like it is verified instead."""
    device = choose(config.device)
    folder = resolved(config.path)
    tokenizer = load_tokenizer(folder, config.chat_template)
    chat = Chat(tokenizer, config.tool_format)
    if config.chat_template:
        try:
            chat.render(PROBE[:1])
        except BirlError as error:
            raise BirlError(f"model.chat_template={config.chat_template}: {error}") from error
    if ranks is not None and ranks.sharded:
        model = sketched(folder, device)
        if ranks.rank == 0:
            verify_small(folder, device)
    else:
        model = load_model(folder).to(device)
        verify(model)
    check_vocabulary(model, tokenizer)
    chat.end_ids = end_ids(model, tokenizer)
    return Policy(folder=folder, model=model, tokenizer=tokenizer, chat=chat, compute=compute)


def cache_bytes(
    model: nn.Module, sequences: int, longest: int, among: int = 1, device: torch.device | None = None
) -> int:
    """engine.kv_cache_gb=0: room for so many sequences of `longest` tokens, but at most `SHARE` of what is free now,
    with the weights and the optimizer in memory. While something is trained there is no cache, so the activations may
    have the same memory."""
    need = sequences * pages_for(longest) * page_bytes(model)
    free = free_memory(device or head(model).weight.device)
    return min(need, int(SHARE * free / among)) if free else need


def longest_prompt(tasks: Sequence[Task], chat: Chat, context: int) -> int:
    lengths = [context if cannot_fit(t.prompt, context) else len(chat.render(t.prompt)) for t in tasks]
    if full := sum(n >= context for n in lengths):
        print(f"Warning: {full} of {len(lengths)} prompts fill the context of {context} tokens: no answers.")
    return max(lengths)


def check_cache(config: schema.Generation, engine: EmbeddedEngine, prompt: int, answer: int) -> None:
    """The engine must be able to hold the longest possible sequence alone; better to know before sampling."""
    longest = min(prompt + answer, engine.context)
    pages, have = pages_for(longest), engine.scheduler.pages.total
    if pages > have:
        size = pages * page_bytes(engine.runner.model) / 2**30
        what = f"engine.kv_cache_gb={config.kv_cache_gb:g}" if config.kv_cache_gb else "Half of the free memory"
        raise BirlError(
            f"{what} holds the keys and values of {have * PAGE} tokens, but one sequence may have {longest} (a prompt "
            f"of {prompt} and an answer of {answer}). Set engine.kv_cache_gb={math.ceil(size * 1000) / 1000:g} or "
            "more, or ask for shorter answers."
        )
