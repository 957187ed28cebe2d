"""CUDA graphs for decoding: several next tokens of all running sequences in a row, without the host.

A decode step is some hundred kernels of a few microseconds; launching them from Python takes ten times as long as
running them. Captured once, they are launched together. The step is captured for a few sizes (rows and pages a row,
powers of two); padding rows write to a scratch page, and their results are dropped. The graph also samples the tokens
and advances to the next position itself, so that up to `AHEAD` replays need one upload before and one download after.

A graph works on addresses: inputs and results live in tensors that are made once, weights and cache must not move
(`Runner.use_graphs` compares). Whatever the step allocates comes from a pool that all graphs share.
"""

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from birl.engine.sampler import draw
from birl.engine.truncation import limits_of, room_of, supports
from birl.kernels.tensors import PAGE
from birl.models.forward import hidden_states
from birl.models.fused import power_of_two
from birl.models.paged import Cache, Paged
from birl.models.states import Stretch
from birl.types import SamplingParams

AHEAD = 16  # tokens per burst; a sequence that ends earlier wastes the rest of its row
NARROWEST = 8  # smallest number of pages per row

#: tokens [B] int64, lengths [B] int32, table [B, width] int32, slots of layers' states [B] int32 -> logits [B, V]
Step = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
#: [B][count] each: tokens, log-probs, and the support that each was sampled from, if requested
Burst = tuple[list[list[int]], list[list[float]], list[list[Any]]]
#: a function without arguments -> one that does the same on the same tensors
Capture = Callable[[Callable[[], None]], Callable[[], None]]


@dataclass(slots=True)
class Graph:
    """The tensors of one size. `host` is uploaded in one copy to `device`, of which the inputs are views: [rows, width]
    pages, [rows] tokens, [rows] lengths, [rows] slots of states, and as float32 [rows] temperatures, [rows, 3] limits
    (top-k, top-p and min-p, only used by `limited` graphs), [AHEAD, rows] uniforms."""

    host: Tensor
    device: Tensor
    table: Tensor
    lengths: Tensor
    tokens: Tensor
    states: Tensor
    temperatures: Tensor
    limits: Tensor
    uniforms: Tensor
    limited: bool
    place: Tensor  # [1] int64: index of the next token of the burst
    results: Tensor  # [AHEAD, 2, rows] float32: tokens (exact up to 2^24) and log-probs
    kept: Tensor | None  # [AHEAD, rows, 1 + room] int32: supports that tokens were sampled from, if one is requested
    replay: Callable[[], None] = lambda: None

    @classmethod
    def make(cls, rows: int, width: int, limited: bool, device: torch.device, room: int = 0) -> "Graph":
        size = rows * (width + 7 + AHEAD)
        host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        there = torch.zeros(size, dtype=torch.int32, device=device)
        table, numbers, floats = there.split([rows * width, 3 * rows, rows * (4 + AHEAD)])
        floats = floats.view(torch.float32)
        return cls(
            host=host,
            device=there,
            table=table.view(rows, width),
            tokens=numbers[:rows],
            lengths=numbers[rows : 2 * rows],
            states=numbers[2 * rows :],
            temperatures=floats[:rows],
            limits=floats[rows : 4 * rows].view(rows, 3),
            uniforms=floats[4 * rows :].view(AHEAD, rows),
            limited=limited,
            place=torch.zeros(1, dtype=torch.int64, device=device),
            results=torch.zeros(AHEAD, 2, rows, dtype=torch.float32, device=device),
            kept=torch.zeros(AHEAD, rows, room + 1, dtype=torch.int32, device=device) if room else None,
        )


@dataclass(slots=True)
class Graphs:
    """All graphs of one model and KV cache. `scratch`, `free`: page and state slot that no request owns."""

    step: Step
    where: torch.device
    scratch: int
    free: int = 0
    addresses: tuple[int, ...] = ()
    capture: Capture | None = None
    made: dict[tuple[int, int, bool, int], Graph] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.capture = self.capture or captured(self.where)

    def run(
        self,
        *,
        tokens: Sequence[int],
        lengths: Sequence[int],
        tables: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        uniforms: Sequence[Sequence[float]],
        count: int,
        states: Sequence[int] = (),
    ) -> Burst:
        """Sample `count` tokens for each of B sequences, given their last tokens, lengths (these included), and the
        slots of their layers' states if they have any."""
        limits = limits_of(params)
        rows = len(tokens)
        last = (max(lengths) + count - 2) // PAGE  # a sequence that ends within the burst writes on, to `scratch`
        graph = self.graph(
            power_of_two(rows), max(power_of_two(last + 1), NARROWEST), limits is not None, room_of(params)
        )
        temperatures = [p.temperature for p in params]
        fill(graph, self.scratch, tokens, lengths, tables, temperatures, uniforms, limits, states, self.free)
        graph.device.copy_(graph.host, non_blocking=True)
        graph.place.zero_()
        for _ in range(count):
            graph.replay()
        result = graph.results[:count, :, :rows].permute(1, 2, 0).cpu()  # synchronises, so `host` may be written again
        kept = [None] * count if graph.kept is None else graph.kept[:count, :rows].cpu()
        each = [supports(own, params) for own in kept]
        return result[0].long().tolist(), result[1].tolist(), list(map(list, zip(*each, strict=True)))

    def graph(self, rows: int, width: int, limited: bool, room: int = 0) -> Graph:
        """The graph of this size, captured if needed. `room`: size of the largest support that a row reports."""
        if (rows, width, limited, room) not in self.made:
            assert self.capture is not None
            graph = Graph.make(rows, width, limited, self.where, room)
            fill(graph, self.scratch, (), (), (), (), (), free=self.free)  # captured on the scratch page only
            graph.device.copy_(graph.host)
            graph.replay = self.capture(lambda: self.once(graph))
            self.made[rows, width, limited, room] = graph
        return self.made[rows, width, limited, room]

    def problem(self) -> str:
        """Reason why a step cannot be captured, or an empty text."""
        graph = Graph.make(1, NARROWEST, False, self.where)
        fill(graph, self.scratch, (), (), (), (), (), free=self.free)
        graph.device.copy_(graph.host)
        with watched_syncs(self.where) as syncs, Watch(self.where) as watch:
            self.once(graph)
        return watch.problem or next(iter(syncs), "")

    def once(self, graph: Graph) -> None:
        """Sample one token for each row and advance to the next position."""
        logits = self.step(graph.tokens.long(), graph.lengths, graph.table, graph.states)
        uniforms = graph.uniforms.index_select(0, graph.place)[0]
        room = 0 if graph.kept is None else graph.kept.shape[2] - 1
        drawn = draw(logits, graph.temperatures, uniforms, graph.limits if graph.limited else None, room)
        graph.results.index_copy_(0, graph.place, torch.stack([drawn.tokens.float(), drawn.logprobs])[None])
        if graph.kept is not None and drawn.kept is not None:
            graph.kept.index_copy_(0, graph.place, drawn.kept[None])
        graph.tokens.copy_(drawn.tokens)
        graph.lengths.add_(1)
        graph.place.add_(1).remainder_(AHEAD)


def begin_states(model: nn.Module, cache: Cache, place: int, page: int) -> None:
    """Run one token of no request on this page, which allocates the states of all layers at their final addresses."""
    device = cache.keys[0].device
    table = torch.full((1, 1), page, dtype=torch.int32, device=device)
    layout = Paged.plain(cache, table, torch.ones(1, dtype=torch.int32, device=device))
    layout.stretches.append(Stretch(place, 0, 1, begun=False))
    nothing = torch.zeros(1, dtype=torch.int64, device=device)
    hidden_states(model, nothing, nothing, layout)


class Watch(TorchDispatchMode):
    """Records the first operation that a graph cannot contain: one that copies a value to the host, or from it to the
    device, or whose result's size depends on values."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.problem = device, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.problem and self.reads(func, args, tree_leaves((args, kwargs)), tree_leaves(result)):
            self.problem = f"{func} waits for the device"
        return result

    def reads(self, func: Any, args: Any, given: list[Any], made: list[Any]) -> bool:
        given, made = ([t for t in tensors if isinstance(t, Tensor)] for tensors in (given, made))
        if "index" in func.__name__:  # index by a mask: counts its elements first
            return any(t.dtype in (torch.bool, torch.uint8) for t in tree_leaves(args[1]) if isinstance(t, Tensor))
        if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
            return True
        if func.namespace not in ("aten", "prim", "prims", "mkldnn"):  # opaque to this check
            return True
        if "grouped_mm" in func.__name__ and given[0].dtype != torch.bfloat16 and self.device.type == "cuda":
            return True  # a loop over the experts
        moved = "copy" in func.__name__ or func.__name__.startswith("lift")
        places = {t.device.type for t in (*given, *made) if t.ndim or moved}
        return self.device.type in places and len(places) > 1


@contextmanager
def watched_syncs(device: torch.device) -> Iterator[list[str]]:
    """Context that records CUDA's synchronisation warnings of this thread. The setting is the process's: another thread
    may meanwhile digest new weights, and wait for the device."""
    syncs, own = list[str](), threading.get_ident()

    def note(message: Warning | str, *rest: Any) -> None:
        # enabling the warnings itself warns that "synchronizing operations" may be missed
        if threading.get_ident() == own and "called a synchronizing" in str(message):
            syncs.append(str(message))

    if device.type != "cuda" or not torch.cuda.is_available():
        yield syncs
        return
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield syncs
        finally:
            torch.cuda.set_sync_debug_mode(before)


def fill(
    graph: Graph, scratch: int, tokens: Sequence[int], lengths: Sequence[int], tables: Sequence[Sequence[int]],
    temperatures: Sequence[float], uniforms: Sequence[Sequence[float]], limits: Tensor | None = None,
    states: Sequence[int] = (), free: int = 0,
) -> None:  # fmt: skip
    """Write the inputs of B sequences and of the padding rows: greedy, one token long, on the scratch page, with the
    states at `free`."""
    rows, width = graph.table.shape
    table, numbers, floats = np.split(graph.host.numpy(), [rows * width, rows * (width + 3)])
    table, numbers, floats = table.reshape(rows, width), numbers.reshape(3, rows), floats.view(np.float32)
    table.fill(scratch)
    for i, pages in enumerate(tables):
        table[i, : len(pages)] = pages
    numbers[0] = 0
    numbers[1] = 1
    numbers[2] = free
    numbers[0, : len(tokens)] = tokens
    numbers[1, : len(lengths)] = lengths
    numbers[2, : len(states)] = states
    floats.fill(0.0)
    floats[: len(temperatures)] = temperatures
    own = floats[rows : 4 * rows].reshape(rows, 3)
    own[:] = 0.0, 1.0, -np.inf  # disabled
    if limits is not None:
        own[: len(limits)] = limits
    later = floats[4 * rows :].reshape(AHEAD, rows)
    for i, u in enumerate(uniforms):
        later[: len(u), i] = u


def captured(device: torch.device) -> Capture:
    """Returns a function that captures graphs on this device, all with one memory pool."""
    pool = torch.cuda.graph_pool_handle()

    def capture(work: Callable[[], None]) -> Callable[[], None]:
        aside = torch.cuda.Stream(device)
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):  # warm-up: Triton compiles, cuBLAS allocates its workspace
            for _ in range(2):
                work()
        torch.cuda.current_stream(device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            work()
        return graph.replay

    return capture
