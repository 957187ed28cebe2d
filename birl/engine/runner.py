"""One forward pass of generation, over the very module that is trained."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor, nn

from birl import kernels
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
    """Prompts and single tokens go through the model together, as rows over a paged cache."""

    def __init__(self, model: nn.Module, routes: bool = False, sequences: int = 1) -> None:
        """`routes`: record in each request which experts computed its tokens. `sequences`: whose states are kept, where
        layers keep such."""
        self.model, self.sequences = model, sequences
        self.routing = routing_for(model) if routes else None
        self.packed = PackedLinears(model)
        self.cache: Cache | None = None
        self.graphs: Graphs | None = None  # on CUDA
        self.eager = ""  # what keeps this model's steps from being captured
        self.looks = Looks(model)

    def run(self, plan: Sequence[ScheduledTokens]) -> Tensor:
        """Hidden states [samplers + guesses, H] for the next token of each sampler of each complete work, and for one
        more behind each guess, in order. Where another row follows, no guesses are made."""
        assert self.cache is not None, "only within steady()"
        device = self.cache.keys[0].device
        counts = [len(w.tokens) + len(w.drafts) for w in plan]
        tokens = torch.tensor([t for w in plan for t in (*w.tokens, *w.drafts)], device=device, dtype=torch.int64)
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
            positions = torch.tensor(lengths, device=device, dtype=torch.int64) - 1
            tokens, positions, pictures = self.looks.row(plan, tokens, positions)
            hidden = hidden_states(self.model, tokens, positions, layout, pictures)
        if self.routing is not None:
            record(plan, self.routing.routes(seen))
        rows: list[int] = []
        copies: list[tuple[int, int]] = []
        for work, end in zip(plan, ends, strict=True):
            for _ in work.samplers:
                rows += range(end - len(work.drafts) - 1, end)
            for follower in work.followers:  # a page that is not full yet becomes its own
                if len(follower) % PAGE:
                    copies.append((work.request.pages[len(follower) // PAGE], follower.pages[-1]))
        self.cache.copy_pages(copies)
        self.cache.states.copy([(w.request.place, follower.place) for w in plan for follower in w.followers])
        if rows != list(range(len(hidden))):
            hidden = hidden[torch.tensor(rows, dtype=torch.int64, device=device)]
        return hidden

    def sample(self, hidden: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Drawn:
        """Hidden states [B, H] -> tokens and log-probs, as `sampler.sample` draws them."""
        decoder = decoder_for(self.model)
        if decoder is None or not all(p.plain for p in params):
            return sample(logits(self.model, hidden), params, uniforms, self.kernels)
        temperatures = torch.tensor([p.temperature for p in params], dtype=torch.float32)
        return Drawn(*decoder.head.sample(hidden, temperatures, torch.tensor(uniforms, dtype=torch.float32)))

    def logits(self, plan: Sequence[ScheduledTokens], hidden: Tensor) -> Tensor:
        """[samplers + guesses, V] float32, of what `run` gave."""
        adapters = [w.request.adapter for w in plan for _ in w.samplers for _ in range(len(w.drafts) + 1)]
        return adapted_logits(self.model, hidden, row_groups(adapters))

    def captures(self, work: ScheduledTokens) -> bool:
        """Is it for captured graphs: a single next token, which nothing but its distribution decides?"""
        request = work.request
        alone = len(work.tokens) == 1 and work.complete and not work.followers
        alone = alone and (work.start > 0 or not state_bytes(self.model))  # without a state, one begins
        special = request.forced or request.guide or request.adapter or request.best
        return self.graphs is not None and alone and not special

    def burst(self, plan: Sequence[ScheduledTokens], count: int) -> Burst:
        """The next `count` tokens of each request, their log-probs and supports, one list each. The host waits for the
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
        """Within, the weights do not change: products use copies laid out for them."""
        decoder, fused = decoder_for(self.model), fused_for(self.model)
        device = head(self.model).weight.device
        self.looks.at(version)
        if self.cache is None:
            # one page and state more than the scheduler knows, which rows that only fill a graph up are written to
            extra = int(graphed(device))
            kind, sequences = head(self.model).weight.dtype, self.sequences + extra
            self.cache = Cache.make(pages.total + extra, slots_of(self.model), kind, device, sequences)
        with decoder.steady(self.cache) if decoder is not None else self.packed.active(version):
            if graphed(device) and self.routing is None and not self.eager:  # routes are recorded by single steps
                own = fused.addresses() if fused else places(self.model)
                self.use_graphs((*own, *self.packed.addresses()), scratch=pages.total)
            yield

    def use_graphs(self, addresses: tuple[int, ...], scratch: int) -> None:
        """A graph reads and writes where it did when it was captured; when anything has moved, all are thrown away."""
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
        """Logits [B, V] of the next tokens; nothing here looks at a value. `states`: places of layers' states [B]."""
        assert self.cache is not None
        layout = Paged.plain(self.cache, table, lengths)
        if states is not None and state_bytes(self.model):
            layout = replace(layout, states=states.long())
        return logits(self.model, hidden_states(self.model, tokens, lengths.long() - 1, layout))

    def release(self, cache: bool = False) -> None:
        """Give back what is laid out again for the next step; with `cache` also that and what knows its address."""
        self.packed.release()
        if cache:
            self.graphs = self.cache = None

    @property
    def same_bits(self) -> bool:
        """Is a row bit-identical in every batch?"""
        decoder = decoder_for(self.model)
        return decoder is not None and decoder.kernels.dtype == torch.bfloat16

    @property
    def repeats(self) -> bool:
        """Is a step that is repeated bit-identical as long as its rows are the same, and only then?"""
        return not self.same_bits and head(self.model).weight.device.type == "cpu"

    @property
    def kernels(self) -> kernels.Kernels | None:
        return kernels.load(torch.float32, 64) if head(self.model).weight.device.type == "cpu" else None


def graphed(device: torch.device) -> bool:
    """Are steps of decoding captured there?"""
    return device.type == "cuda"


def places(model: nn.Module) -> tuple[int, ...]:
    """Addresses of everything that a captured forward pass of transformers reads."""
    return tuple(t.data_ptr() for t in (*model.parameters(), *model.buffers()))


def record(plan: Sequence[ScheduledTokens], routes: Tensor) -> None:
    """Routes [T, bytes] of everything in `plan`, guesses included, to the requests that it was computed for."""
    size, data, place = routes.shape[1], routes.numpy().tobytes(), 0
    for work in plan:
        request, count = work.request, len(work.tokens) + len(work.drafts)
        request.routes[work.start :] = [data[i * size : (i + 1) * size] for i in range(place, place + count)]
        place += count
        for follower in work.followers:
            follower.routes = request.routes[: len(follower)]
