"""Forward passes of generation, over the module that is trained."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor, nn

from birl import kernels
from birl.data.support import uploaded
from birl.engine.graphs import Burst, Graphs, begin_states
from birl.engine.looks import Looks
from birl.engine.pages import Pages, sharing
from birl.engine.sampler import Drawn, sample
from birl.engine.scheduler import ScheduledTokens
from birl.kernels.tensors import PAGE
from birl.models.decoder import decoder_for
from birl.models.forward import hidden_states, logits
from birl.models.fused_decoder import fused_for
from birl.models.heads import head
from birl.models.low_rank import adapted, row_groups
from birl.models.packed import PackedLinears
from birl.models.paged import Cache, Paged
from birl.models.routing import routing_for
from birl.models.slots import slots_of, state_bytes
from birl.models.states import Stretch
from birl.models.target_logprobs import adapted_logits
from birl.models.vision import pictures_of
from birl.types import SamplingParams


class Runner:
    """Runs prefill and decode tokens through the model together, as rows over a paged KV cache."""

    def __init__(self, model: nn.Module, routes: bool = False, sequences: int = 1) -> None:
        """`routes`: record the experts that computed each request's tokens. `sequences`: number of recurrent states, if
        layers have any."""
        self.model, self.sequences = model, sequences
        self.routing = routing_for(model) if routes else None
        self.packed = PackedLinears(model)
        self.cache: Cache | None = None
        self.graphs: Graphs | None = None  # on CUDA
        self.eager = ""  # why this model's steps cannot be captured
        self.looks = Looks(model)

    def run(self, plan: Sequence[ScheduledTokens]) -> Tensor:
        """Hidden states [samplers + drafts, H] for the next token of each sampler of each complete work, and for one
        more after each draft, in order. Work with followers has no drafts."""
        assert self.cache is not None, "only within steady()"
        device = self.cache.keys[0].device
        counts = [len(w.tokens) + len(w.drafts) for w in plan]
        tokens = uploaded([t for w in plan for t in (*w.tokens, *w.drafts)], torch.int64, device)
        lengths = [w.start + i + 1 for w, n in zip(plan, counts, strict=True) for i in range(n)]
        if device.type == "cpu":
            tables = [w.request.pages for w, n in zip(plan, counts, strict=True) for _ in range(n)]
            layout = Paged.of(self.cache, tables, lengths, *sharing(tables, lengths), apart=max(counts) == 1)
        else:
            layout = Paged.repeated(self.cache, [w.request.pages for w in plan], counts, lengths)
        ends = list(accumulate(counts))
        each = zip(plan, counts, ends, strict=True)
        layout.stretches.extend(Stretch(w.request.place, end - n, n, begun=w.start > 0) for w, n, end in each)
        groups = row_groups([w.request.adapter for w, n in zip(plan, counts, strict=True) for _ in range(n)])
        routed = nullcontext({}) if self.routing is None else self.routing.watching()
        with routed as seen, adapted(self.model, groups) if groups else nullcontext():
            positions = uploaded(lengths, torch.int64, device) - 1
            tokens, positions, pictures = self.looks.row(plan, tokens, positions)
            hidden = hidden_states(self.model, tokens, positions, layout, pictures)
        if self.routing is not None:
            record(plan, self.routing.routes(seen))
        rows: list[int] = []
        copies: list[tuple[int, int]] = []
        for work, end in zip(plan, ends, strict=True):
            for _ in work.samplers:
                rows += range(end - len(work.drafts) - 1, end)
            for follower in work.followers:  # a partial page is copied for each follower
                if len(follower) % PAGE:
                    copies.append((work.request.pages[len(follower) // PAGE], follower.pages[-1]))
        self.cache.copy_pages(copies)
        self.cache.states.copy([(w.request.place, follower.place) for w in plan for follower in w.followers])
        if rows != list(range(len(hidden))):
            hidden = hidden[uploaded(rows, torch.int64, device)]
        return hidden

    def sample(self, hidden: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Drawn:
        """Sample from hidden states [B, H]; tokens and log-probs as in `sampler.sample`."""
        decoder = decoder_for(self.model)
        if decoder is None or not all(p.plain for p in params):
            return sample(logits(self.model, hidden), params, uniforms, self.kernels)
        temperatures = torch.tensor([p.temperature for p in params], dtype=torch.float32)
        return Drawn(*decoder.head.sample(hidden, temperatures, torch.tensor(uniforms, dtype=torch.float32)))

    def logits(self, plan: Sequence[ScheduledTokens], hidden: Tensor) -> Tensor:
        """Logits [samplers + drafts, V] float32 of the hidden states of `run`."""
        adapters = [w.request.adapter for w in plan for _ in w.samplers for _ in range(len(w.drafts) + 1)]
        return adapted_logits(self.model, hidden, row_groups(adapters))

    def captures(self, work: ScheduledTokens) -> bool:
        """Whether captured graphs can run it: a single next token that only depends on its distribution."""
        request = work.request
        alone = len(work.tokens) == 1 and work.complete and not work.followers
        alone = alone and (work.start > 0 or not state_bytes(self.model))  # without a state, it is initialised
        special = request.forced or request.guide or request.adapter or request.best
        return self.graphs is not None and alone and not special

    def burst(self, plan: Sequence[ScheduledTokens], count: int) -> Burst:
        """The next `count` tokens of each request, their log-probs and supports, one list each. Synchronises with the
        device once."""
        assert self.graphs is not None, "`captures` says no"
        requests = [w.request for w in plan]
        return self.graphs.run(
            tokens=[w.tokens[0] for w in plan],
            lengths=[w.start + 1 for w in plan],
            tables=[r.pages for r in requests],
            params=[r.params for r in requests],
            uniforms=[r.uniforms(count) for r in requests],
            count=count,
            states=[max(r.place, 0) for r in requests],
        )

    @contextmanager
    def steady(self, version: int, pages: Pages) -> Iterator[None]:
        """Context in which the weights do not change: matrix products use repacked copies of them."""
        decoder, fused = decoder_for(self.model), fused_for(self.model)
        device = head(self.model).weight.device
        self.looks.at(version)
        if self.cache is None:
            # one page and state more than the scheduler knows, for the padding rows of graphs
            extra = int(graphed(device))
            kind, sequences = head(self.model).weight.dtype, self.sequences + extra
            self.cache = Cache.make(pages.total + extra, slots_of(self.model), kind, device, sequences)
        with decoder.steady(self.cache) if decoder is not None else self.packed.active(version):
            if graphed(device) and self.routing is None and not self.eager:  # routes are recorded by single steps only
                if fused is not None:
                    fused.join()
                self.use_graphs((*places(self.model), *self.packed.addresses()), scratch=pages.total)
            yield

    def use_graphs(self, addresses: tuple[int, ...], scratch: int) -> None:
        """Create the graphs, or drop them if an address has changed: captured graphs use fixed addresses."""
        assert self.cache is not None
        if self.graphs is not None and self.graphs.addresses == addresses:
            return
        device = self.cache.keys[0].device
        graphs = Graphs(self.step_of_graph, device, scratch=scratch, free=self.sequences, addresses=addresses)
        if self.graphs is None:
            why = "its pictures move the positions of tokens" if pictures_of(self.model) else ""
            if state_bytes(self.model) and not why:
                begin_states(self.model, self.cache, self.sequences, scratch)
            self.eager = why or graphs.problem()
        self.graphs = None if self.eager else graphs
        if self.eager:
            name = type(self.model).__name__
            print(f"birl: {name} decodes without CUDA graphs, which is slower: {self.eager}.", file=sys.stderr)

    def step_of_graph(self, tokens: Tensor, lengths: Tensor, table: Tensor, states: Tensor | None = None) -> Tensor:
        """Logits [B, V] of the next tokens, without host reads. `states`: slots of layers' states [B]."""
        assert self.cache is not None
        layout = Paged.plain(self.cache, table, lengths)
        if states is not None and state_bytes(self.model):
            layout = replace(layout, states=states.long())
        return logits(self.model, hidden_states(self.model, tokens, lengths.long() - 1, layout))

    def release(self, cache: bool = False) -> None:
        """Free the repacked weights, which the next step makes again; with `cache` also KV cache and graphs."""
        self.packed.release()
        if cache:
            self.graphs = self.cache = None

    @property
    def same_bits(self) -> bool:
        """Whether a row is bit-identical in every batch."""
        return decoder_for(self.model) is not None

    @property
    def repeats(self) -> bool:
        """Whether a repeated step is bit-identical if its rows are the same, and only then."""
        return not self.same_bits and head(self.model).weight.device.type == "cpu"

    @property
    def kernels(self) -> kernels.Kernels | None:
        return kernels.load(torch.float32, 64) if head(self.model).weight.device.type == "cpu" else None


def graphed(device: torch.device) -> bool:
    """Whether decode steps are captured on this device."""
    return device.type == "cuda"


def places(model: nn.Module) -> tuple[int, ...]:
    """Addresses of everything that a captured forward pass reads."""
    return tuple(t.data_ptr() for t in (*model.parameters(), *model.buffers()))


def record(plan: Sequence[ScheduledTokens], routes: Tensor) -> None:
    """Assign routes [T, bytes] of all tokens in `plan`, drafts included, to the requests of these tokens."""
    size, data, place = routes.shape[1], routes.numpy().tobytes(), 0
    for work in plan:
        request, count = work.request, len(work.tokens) + len(work.drafts)
        request.routes[work.start :] = [data[i * size : (i + 1) * size] for i in range(place, place + count)]
        place += count
        for follower in work.followers:
            follower.routes = request.routes[: len(follower)]
