"""Opens an embedded engine for a policy, with a KV cache that fits, and manages the weights that it samples from; or
for several policies: one base model, and an adapter for each policy."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from birl.config import schema
from birl.engine.engine import EmbeddedEngine
from birl.engine.pages import pages_for
from birl.errors import BirlError
from birl.kernels.tensors import PAGE
from birl.learner.learner import Learner
from birl.learner.policy import DTYPES, Policy
from birl.models.decoder import weights_changed
from birl.models.forward import forget
from birl.models.heads import head
from birl.models.load import cast, end_ids
from birl.models.low_rank import AdapterWeights
from birl.models.quantized import quantized_layers, rounded
from birl.models.slices import fill, quantizable, sketched
from birl.models.slots import page_bytes, state_bytes
from birl.models.vision import give, language_model, pictures_of, still
from birl.parallel.machine import free_memory, give_back
from birl.types import PAST, Completion, Engine, SamplingParams

if TYPE_CHECKING:  # only imported by runs that use it
    from birl.learner.policies import Policies

SHARE = 0.5  # share of the free memory for the KV cache


def open_engine(
    policy: Policy,
    config: schema.Generation,
    context: int,
    version: Callable[[], int] | None,
    longest: int | None = None,
    routes: bool = False,
    among: int = 1,
) -> EmbeddedEngine:
    """An engine that samples from the policy's module. `version` None: the engine has its own weights. `longest`:
    maximum length of a sequence [tokens]; `context` if unknown. `routes`: return the experts that computed each token.
    `among`: number of engines that share the memory. engine.weights=int8 needs a module of the engine's own."""
    if config.weights == "int8":
        round_weights(policy.model)
    return EmbeddedEngine(
        policy.model,
        policy.tokenizer,
        end_ids=end_ids(policy.model, policy.tokenizer),
        context=context,
        compute=policy.compute,
        version=version,
        recompute_kv=config.recompute_kv,
        max_batch=config.max_batch,
        kv_cache_gb=config.kv_cache_gb
        or cache_bytes(policy.model, config.max_batch, longest or context, among) / 2**30,
        draft_rows=config.draft_rows,
        routes=routes,
    )


def cache_bytes(
    model: nn.Module, sequences: int, longest: int, among: int = 1, device: torch.device | None = None
) -> int:
    """Size of the KV cache for engine.kv_cache_gb=0: room for `sequences` of `longest` tokens, but at most `SHARE` of
    the memory that is free now, with the weights and the optimizer in memory, and on a GPU with copies of the quantised
    layers. While training there is no cache, so the activations may use the same memory."""
    need = sequences * (pages_for(longest) * page_bytes(model) + state_bytes(model))
    device = device or head(model).weight.device
    if device.type == "cuda":
        give_back(device)  # blocks of the float32 weights that were loaded, which PyTorch keeps
    free = free_memory(device)
    if device.type == "cuda":
        free = max(free - sum(layer.weight.nbytes for layer in quantized_layers(model).values()), int(free > 0))
    return min(need, int(SHARE * free / among)) if free else need


def check_cache(config: schema.Generation, engine: EmbeddedEngine, prompt: int, answer: int) -> None:
    """Check that the KV cache can hold the longest possible sequence alone. Raises `BirlError` before sampling."""
    longest = min(prompt + answer, engine.context)
    pages, have = pages_for(longest), engine.scheduler.pages.total
    if pages > have:
        model = engine.runner.model
        size = (pages * page_bytes(model) + config.max_batch * state_bytes(model)) / 2**30
        what = f"engine.kv_cache_gb={config.kv_cache_gb:g}" if config.kv_cache_gb else "Half of the free memory"
        beside = f" beside the states of engine.max_batch={config.max_batch} sequences" if state_bytes(model) else ""
        raise BirlError(
            f"{what} holds the keys and values of {have * PAGE} tokens{beside}, but one sequence may have "
            f"{longest} (a prompt of {prompt} and an answer of {answer}). Set engine.kv_cache_gb="
            f"{math.ceil(size * 1000) / 1000:g} or more, or ask for shorter answers."
        )


@dataclass(slots=True, kw_only=True)
class Sampled:
    """The weights that the embedded engine samples from: the learner's own module; or a full copy, updated after each
    step, if the learner's weights are sharded or the engine has them in int8.

    `copy`: None if the engine has the learner's module; `version`: learner version of the copy; `int8`: it is in int8;
    `own`: the engine of this process."""

    policy: Policy
    learner: Learner
    dtype: str
    copy: nn.Module | None = None
    int8: bool = False
    version: int = 0
    own: EmbeddedEngine | None = None

    @property
    def model(self) -> nn.Module:
        return self.copy or self.learner.model

    def engine(self, keys: schema.Engine, context: int, longest: int, routes: bool) -> EmbeddedEngine:
        """An engine that samples from these weights; arguments as in `open_engine`."""
        policy, learner = self.policy, self.learner
        ranks, device = learner.ranks, learner.device
        among = ranks.shares if device.type == "cpu" else 1
        self.int8 = keys.weights == "int8"
        if not ranks.sharded and not self.int8:
            self.own = open_engine(policy, keys, context, lambda: learner.version, longest, routes, among)
            return self.own
        sees = language_model(policy.model) is not None
        self.copy = cast(sketched(policy.folder, device, pictures=sees), DTYPES[self.dtype])
        give(self.copy, pictures_of(policy.model), frozen=bool(still(policy.model)))
        fill(self.copy.requires_grad_(False))
        copied = replace(policy, model=self.copy)
        self.own = open_engine(copied, keys, context, lambda: self.version, longest, routes, among)
        return self.own

    @torch.no_grad()
    def refresh(self) -> None:
        """(every rank) Copy the learner's weights to the copies, one tensor at a time."""
        copies = {} if self.copy is None else dict(self.copy.named_parameters())
        for name, parameter in self.learner.model.named_parameters():
            own = parameter.to(DTYPES[self.dtype])  # half the bytes of float32 between ranks
            whole = own.full_tensor() if isinstance(own, DTensor) else own
            if name in copies:
                copies[name].copy_(whole)
        if self.copy is not None:
            weights_changed(self.copy)
            if self.int8:
                round_weights(self.copy)
        self.version = self.learner.version

    def rest(self) -> None:
        """(every rank) Let this process' engine free memory for training."""
        if self.own is not None:
            self.own.rest()


@torch.no_grad()
def round_weights(model: nn.Module) -> None:
    """Round all linear layers of the body, except routers, to int8 values, in place; from now on kernels may read their
    codes (`Decoder`)."""
    for linear in quantizable(model).values():
        linear.weight.data.copy_(rounded(linear.weight))
    if getattr(model, "in_int8", False):
        weights_changed(model)
    else:
        model.in_int8 = True  # pyright: ignore
        forget(model)


@dataclass(frozen=True, slots=True)
class PolicyEngine:
    """Implements `birl.types.Engine` for one policy. `adapter`: returns its current adapter at each request."""

    engine: EmbeddedEngine
    adapter: Callable[[], AdapterWeights]

    @property
    def version(self) -> int:
        return self.engine.version

    async def generate(self, prompt_ids: tuple[int, ...], params: SamplingParams, session: str = "") -> Completion:
        return await self.engine.generate(prompt_ids, params, session, adapter=self.adapter())

    async def close(self) -> None:
        """Does nothing: the engine is shared with the other policies."""


def engines_of(names: Sequence[str], engine: Engine, policies: "Policies | None", draw: int) -> Mapping[str, Engine]:
    """An engine for each policy by name and, if a league keeps earlier versions, for the earlier version that a group
    draws. `policies` None: a single policy, whose weights the engine has."""
    if policies is None:
        return dict.fromkeys(names, engine)
    assert isinstance(engine, EmbeddedEngine), "no other has adapters"
    result: dict[str, Engine] = {name: PolicyEngine(engine, partial(policies.adapter, name)) for name in names}
    for name, versions in policies.past.items():
        if versions:
            result[name + PAST] = PolicyEngine(engine, partial(policies.adapter, name, draw % len(versions)))
    return result
