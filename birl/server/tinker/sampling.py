"""Sampling, and log-probs of prompts, with the weights of a sampling session."""

import asyncio
import secrets
from concurrent.futures import Executor
from dataclasses import dataclass, field, fields, replace
from functools import partial
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn

from birl.engine.engine import EmbeddedEngine
from birl.engines.kinds import Wanted
from birl.engines.servers import Servers
from birl.engines.wire import AdapterParams
from birl.learner.low_rank_run import SharedBase
from birl.models.low_rank import AdapterWeights, RowGroup
from birl.models.target_logprobs import Top, drawn, target_logprobs, top_logprobs
from birl.models.vision import plain
from birl.seeds import derive_seed
from birl.server.tinker import wire
from birl.server.tinker.requests import Sample
from birl.server.tinker.tenants import Tenant, Turns
from birl.types import Completion, SamplingParams, Stop

EMPTY, NO_LOGPROB = 0, -99999.0  # values of empty cells in tables of top log-probs
STOPPED, TOO_LONG = 0, 1  # stop reasons of the message


@dataclass(slots=True)
class Scores:
    """Requested log-probs of a prompt: [T], NaN if there is none; top log-probs; those of `targets`; and sampled
    alternatives with theirs."""

    logprobs: np.ndarray | None = None
    top: tuple[np.ndarray, np.ndarray] | None = None
    targets: np.ndarray | None = None
    alternatives: tuple[np.ndarray, np.ndarray] | None = None


@dataclass(slots=True)
class ManyEngines:
    """`birl serve` processes behind a router (`use`): each is sent an adapter once, when a request first uses it."""

    wanted: Wanted
    servers: Servers = field(init=False)
    run: str = field(default_factory=lambda: secrets.token_hex(8))
    used: "WeakValueDictionary[str, AdapterWeights]" = field(default_factory=WeakValueDictionary)

    @property
    def context(self) -> int:
        return self.wanted.context

    def use(self, servers: Servers) -> None:
        self.servers = servers
        for remote in servers.remotes.values():
            remote.adapters = self.used  # pyright: ignore[reportAttributeAccessIssue]

    async def generate(self, prompt_ids: tuple[int, ...], params: SamplingParams, *,
                       adapter: AdapterWeights | None = None) -> Completion:  # fmt: skip
        """Sample an answer. Raises `EngineDown` if no engine answers in time."""
        if adapter is None:
            return await self.servers.generate(prompt_ids, params)
        name = f"{self.run}-{adapter.number}"
        self.used[name] = adapter
        given = {f.name: getattr(params, f.name) for f in fields(params)}
        return await self.servers.generate(prompt_ids, AdapterParams(**given, adapter=name))

    async def close(self) -> None:
        await self.servers.close()


@dataclass(slots=True)
class Sampling:
    base: SharedBase
    engine: EmbeddedEngine | ManyEngines
    compute: Executor
    turns: Turns

    async def answer(self, tenant: Tenant, sample: Sample, adapter: AdapterWeights | None, number: int) -> bytes:
        """A SampleResponse message. `number`: of the request, the seed if it has none."""
        seed = sample.params.seed if sample.params.seed is not None else number

        async def one(i: int) -> Completion:
            async with self.turns.turn(tenant):
                params = replace(sample.params, seed=derive_seed(seed, i))
                result = await self.engine.generate(sample.prompt, params, adapter=adapter)
                tenant.sampled += len(result.tokens)
            return result

        loop = asyncio.get_running_loop()
        completions = await asyncio.gather(*map(one, range(sample.count)))
        scores = Scores()
        if sample.asks:  # otherwise it does not wait for training passes
            scores = await loop.run_in_executor(self.compute, self.scores, sample, adapter, seed)
        tops: list[Top | None] = [None] * len(completions)
        if sample.top_sampled:
            for i, completion in enumerate(completions):
                args = (sample.prompt, tuple(completion.tokens.tolist()), sample.top_sampled, adapter)
                tops[i] = await loop.run_in_executor(self.compute, self.top_sampled, *args)
        return response(completions, tops, scores)

    def scores(self, sample: Sample, adapter: AdapterWeights | None, seed: int) -> Scores:
        """(compute thread) Score a prompt in one pass."""
        if len(sample.prompt) < 2:
            return unscored(sample)
        ids = torch.tensor(sample.prompt[:-1], dtype=torch.int64)  # position i predicts token i + 1
        return self.base.evaluated(ids, adapter, partial(scored, replace(sample, pictures=()), seed))

    def top_sampled(self, prompt: tuple[int, ...], answer: tuple[int, ...], count: int,
                    adapter: AdapterWeights | None) -> Top | None:  # fmt: skip
        """(compute thread) Top log-probs of each position of an answer."""
        if not answer:
            return None
        ids = torch.tensor((*prompt, *answer)[:-1], dtype=torch.int64)
        return self.base.evaluated(ids, adapter, partial(top_behind, len(prompt) - 1, count))


def top_behind(first: int, count: int, model: nn.Module, hidden: Tensor, groups: list[RowGroup]) -> Top:
    """Top log-probs from position `first` on (for `SharedBase.evaluated`)."""
    own = [RowGroup(0, len(hidden) - first, g.adapter) for g in groups]
    return top_logprobs(model, hidden[first:], count, own)


def unscored(sample: Sample) -> Scores:
    """Scores of a prompt of one token, which nothing predicts: tables without rows."""
    result, none = Scores(), torch.zeros(0, sample.top or sample.alternatives, dtype=torch.float32)
    if sample.scored_from is not None:
        result.logprobs = np.full(1, np.nan, np.float32)
        result.top = table(Top(none, none), 1, 1) if sample.top else None
    if sample.targets is not None:
        result.targets = sample.targets.astype(np.float32)
    if sample.alternatives:
        empty = np.zeros((0, sample.alternatives), np.int64)
        result.alternatives = empty, empty.astype(np.float32)
    return result


def scored(sample: Sample, seed: int, model: nn.Module, hidden: Tensor, groups: list[RowGroup]) -> Scores:
    """Scores of a prompt, of which `hidden` has all tokens but the last (for `SharedBase.evaluated`)."""
    result, size = Scores(), len(sample.prompt)
    if sample.scored_from is not None:
        first = sample.scored_from - 1
        part, own = hidden[first:], [RowGroup(0, size - 1 - first, g.adapter) for g in groups]
        actual = plain(torch.tensor(sample.prompt[first + 1 :], dtype=torch.int64, device=hidden.device))[:, None]
        result.logprobs = np.full(size, np.nan, np.float32)
        result.logprobs[first + 1 :] = target_logprobs(model, part, actual, own)[:, 0].cpu().numpy()
        result.logprobs[first + 1 :][sample.shown[first + 1 :]] = 0.0  # images are not predicted: their factor is 1
        if sample.top:
            result.top = table(top_logprobs(model, part, sample.top, own), size, first + 1)
    if sample.targets is not None:
        ids = torch.from_numpy(sample.targets).to(hidden.device)
        of_targets = target_logprobs(model, hidden, ids.clamp(min=0), groups).cpu().numpy()
        result.targets = np.where(sample.targets >= 0, of_targets, 0.0).astype(np.float32)
    if sample.alternatives:
        random = np.random.Generator(np.random.Philox(key=derive_seed(seed, -1) % 2**64))
        uniforms = torch.from_numpy(random.random((size - 1, sample.alternatives), np.float32))
        tokens, logp = drawn(model, hidden, uniforms, sample.params.temperature, groups)
        result.alternatives = tokens.numpy(), logp.numpy()
    return result


def table(top: Top, size: int, first: int) -> tuple[np.ndarray, np.ndarray]:
    """A table of top log-probs, with empty rows before position `first`."""
    tokens = np.full((size, top.tokens.shape[1]), EMPTY, np.int32)
    logprobs = np.full(tokens.shape, NO_LOGPROB, np.float32)
    tokens[first:], logprobs[first:] = top.tokens.numpy(), top.logprobs.numpy()
    return tokens, logprobs


def response(completions: list[Completion], tops: list[Top | None], scores: Scores) -> bytes:
    body = b""
    for completion, top in zip(completions, tops, strict=True):
        tokens = completion.tokens.astype("<i4").tobytes()
        logprobs = completion.logprobs.astype("<f4").tobytes()
        one = wire.number_field(1, STOPPED if completion.stop == Stop.STOP else TOO_LONG)
        one += wire.bytes_field(2, tokens) + wire.bytes_field(3, logprobs)
        if top is not None:
            one += wire.bytes_field(4, _table(top.tokens.numpy().astype(np.int32), top.logprobs.numpy()))
        body += wire.bytes_field(1, one)
    if scores.logprobs is not None:
        body += wire.bytes_field(2, scores.logprobs.astype("<f4").tobytes())
    if scores.top is not None:
        body += wire.bytes_field(3, _table(*scores.top))
    body += wire.number_field(4, 0)
    if scores.targets is not None:
        body += wire.tensor_field(5, scores.targets)
    if scores.alternatives is not None:
        both = wire.tensor_field(1, scores.alternatives[0]) + wire.tensor_field(2, scores.alternatives[1])
        body += wire.bytes_field(6, both)
    return body


def _table(tokens: np.ndarray, logprobs: np.ndarray) -> bytes:
    """A TopkLogprobs message."""
    body = wire.bytes_field(1, tokens.astype("<i4").tobytes()) + wire.bytes_field(2, logprobs.astype("<f4").tobytes())
    return body + wire.number_field(3, tokens.shape[1]) + wire.number_field(4, len(tokens))
