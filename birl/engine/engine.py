"""The embedded engine: continuous batching over the module that the learner trains, without a second copy of the
weights; or, in a process of its own (`birl serve`), over a module that takes new weights at a token boundary.

    generate() --adds--> Scheduler.waiting --plan--> running --run, sample--> finished --resolves--> generate()
    (event loop)                            (compute thread, one for the whole process)           (event loop)

A token depends on its request's weights, context and random number only. Optimisations (batching, shared prompts,
draft tokens, preemption) must not change it.

Everything that computes runs on the learner's thread: engine and learner never run at the same time, and CPU threads
are not oversubscribed. When the weights change in the middle of an answer, it continues with the new ones: each token
records its version (`versions`). With `recompute_kv` its KV cache is recomputed, so that the log-prob of a token of
version v is exactly what version v gives it; without, the KV cache of older tokens is kept.
"""

import asyncio
import time
from collections.abc import Callable, Collection
from concurrent.futures import Executor
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from birl.engine.drafts import REMEMBERED, Drafts
from birl.engine.pages import Pages, pages_for
from birl.engine.request import Request, TopLogprobs
from birl.engine.runner import Runner
from birl.engine.scheduler import Scheduler
from birl.engine.steps import Steps
from birl.engine.weights import Weights
from birl.errors import BirlError, EngineDown
from birl.models.heads import head
from birl.models.low_rank import AdapterWeights
from birl.models.slots import page_bytes, state_bytes
from birl.models.vision import sight
from birl.parallel.machine import check_returned, give_back, held_memory
from birl.samples import MOST
from birl.spans import answered, done
from birl.text.chat import StopChecker
from birl.text.grammar import Guide
from birl.types import Completion, Held, SamplingParams, Stop, Update
from birl.waits import alive


class EmbeddedEngine:
    """Implements `birl.types.Engine`.

    `version` is called at every step and recorded with the tokens of that step; without it the engine has its own copy
    of the weights, which `load` replaces. `context`: longest sequence [tokens]; `kv_cache_gb`: memory of the KV cache
    [GiB]. With `routes` completions contain the experts that computed their tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_ids: frozenset[int],
        context: int,
        compute: Executor,
        version: Callable[[], int] | None = None,
        recompute_kv: bool = True,
        max_batch: int = 64,
        kv_cache_gb: float = 1.0,
        draft_rows: int = 16,
        routes: bool = False,
    ) -> None:
        self.tokenizer, self.end_ids, self.context = tokenizer, end_ids, context
        self.compute, self.recompute_kv = compute, recompute_kv
        self.weights = None if version else Weights(model)
        self._version = version or (lambda: self.weights.version if self.weights else 0)
        self.paused = self.asleep = False
        self.runner = Runner(model, routes, sequences=max_batch)
        keeps = state_bytes(model)  # recurrent state is not in pages: no prefix reuse, and drafts cannot be undone
        pages = cache_pages(model, max_batch, context, kv_cache_gb)
        on_cpu = next(model.parameters()).device.type == "cpu"  # a GPU uses CUDA graphs instead of drafts
        drafts = Drafts(draft_rows if on_cpu and not keeps else 0)
        self.scheduler = Scheduler(
            max_batch=max_batch, pages=Pages(pages), cache=not keeps, early=not (routes or keeps), drafts=drafts
        )
        self.steps = Steps(context, self.runner, self.scheduler, self._version())
        self.counters = self.steps.counters
        self._arrivals: list[Request] = []
        self._open: set[Request] = set()  # requests without a completion yet
        self._pump: asyncio.Task[None] | None = None
        self._closed: EngineDown | None = None

    @property
    def version(self) -> int:
        return self._version()

    async def generate(
        self,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        session: str = "",
        watch: Callable[[Request], None] | None = None,
        *,
        guide: Guide | None = None,
        best: TopLogprobs | None = None,
        adapter: AdapterWeights | None = None,
    ) -> Completion:
        """Sample one answer. A prompt that fills the context gives an empty completion with Stop.LENGTH.

        `watch` is called with the request whenever it has new tokens. Cancelling the caller aborts the request; `abort`
        ends it with the tokens it has. With a `guide` only allowed tokens are sampled, and log-probs are those of the
        distribution over these. `best` is filled. `adapter` is added to the weights. Waits while the engine is paused.
        Raises `BirlError` if the KV cache could not hold the request, and `EngineDown` if the engine was closed.
        """
        room = min(params.max_tokens, self.context - len(prompt_ids))
        if not prompt_ids:
            raise BirlError("The prompt is empty: there is nothing to predict the first token from.")
        if params.support and not 0 < params.top_k <= MOST:
            raise BirlError(f"support=True: top_k bounds the support that is reported for each token; set 1 to {MOST}.")
        if self._closed is not None:
            raise self._closed
        if room <= 0:
            return Completion.of((), (), (), Stop.LENGTH)
        request = Request(
            prompt=prompt_ids,
            params=params,
            max_tokens=room,
            end_ids=frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else self.end_ids),
            checker=StopChecker(self.tokenizer, params.stop) if params.stop else None,
            future=asyncio.get_running_loop().create_future(),
            session=session,
            sight=sight(self.runner.model, prompt_ids),
            watch=watch,
            guide=guide,
            best=best,
            adapter=adapter,
        )
        self._arrivals.append(request)
        self._open.add(request)
        self._start()
        began = time.perf_counter()
        try:
            result = await request.future
            answered(result, began, session)
            return result
        except asyncio.CancelledError:
            request.aborted = True
            raise
        finally:
            self._open.discard(request)

    def _start(self) -> None:
        if not self.paused and (self._pump is None or self._pump.done()):
            self._pump = asyncio.create_task(self._run())

    async def pause(self, abort: bool = False) -> None:
        """Stop at the next token boundary. Running requests are kept and continue after `resume`; with `abort` they end
        with the tokens they have. New requests wait."""
        if abort:
            await self.abort()
        self.paused = True
        if self._pump is not None and not self._pump.done():
            await asyncio.wait([self._pump])

    async def resume(self) -> None:
        if self.asleep:
            raise BirlError("The engine sleeps: wake it and load weights first.")
        self.paused = False
        if self._open:
            self._start()

    async def abort(self, sessions: Collection[str] | None = None) -> int:
        """End the requests of these sessions, or all, with the tokens they have; returns their number."""
        chosen = [r for r in self._open if sessions is None or r.session in sessions]
        for request in chosen:
            request.aborted = True
        if self.paused and chosen:
            self._arrivals = [r for r in self._arrivals if not r.aborted]
            self.scheduler.retire()
            for request in chosen:
                self._finish(request)
        elif chosen:
            self._start()
            await asyncio.wait([r.future for r in chosen])
        return len(chosen)

    async def load(self, update: Update) -> Held:
        """Load new weights: read and compared during generation, then swapped in at a token boundary. Raises
        `WeightsFailed`; the old weights are then kept."""
        weights = self._own_weights()
        loop = asyncio.get_running_loop()
        staged = await asyncio.to_thread(weights.stage, update)

        def swap() -> Held:
            began = time.perf_counter()
            self.steps.renew(update.version, self.recompute_kv)
            held = weights.swap(staged, update)
            return replace(held, seconds=time.perf_counter() - began)

        return await loop.run_in_executor(self.compute, swap)

    async def digests(self) -> dict[str, str]:
        """Digests of all current weights, by name."""
        return await asyncio.get_running_loop().run_in_executor(self.compute, self._own_weights().digests)

    async def sleep(self) -> None:
        """Free the memory of weights and KV cache. Running requests are kept; they continue after `wake` and a `load`.
        Raises `BirlError` if a GPU did not get the memory back: the engine sleeps nevertheless."""
        weights = self._own_weights()
        await self.pause()
        self.asleep = True

        def drop() -> None:
            device, cache = head(self.runner.model).weight.device, self.runner.cache
            before, owed = held_memory(device), weights.nbytes + (0 if cache is None else cache.nbytes)
            del cache
            self.scheduler.restart()
            self.runner.release(cache=True)
            weights.drop()
            give_back(device)
            if before:
                fix = "Something in this process holds them still, which is a bug of birl's."
                check_returned(before - held_memory(device), owed, device, "A sleeping engine", fix)

        await asyncio.get_running_loop().run_in_executor(self.compute, drop)

    async def wake(self) -> None:
        """Allocate memory for weights again; they are undefined until `load`. Then call `resume`."""
        if self.asleep:
            await asyncio.get_running_loop().run_in_executor(self.compute, self._own_weights().allocate)
            self.asleep = False

    def _own_weights(self) -> Weights:
        if self.weights is None:
            raise BirlError("This engine samples from the learner's own weights: there is nothing to load.")
        return self.weights

    def rest(self) -> None:
        """(compute thread) Called before training, which may use the memory of the KV cache unless requests run, or
        CUDA graphs contain its address: capturing them again would take longer than a step."""
        if not self.scheduler.running and self.runner.graphs is None:
            self.scheduler.pages.forget()
            self.runner.release(cache=True)

    async def close(self) -> None:
        """Close the engine: waiting and later callers get `EngineDown`."""
        self._closed = EngineDown("the engine was closed")
        for request in self._open:
            request.aborted = True
            if not request.future.done():
                request.future.set_exception(self._closed)
        if self._pump is not None and not self._pump.done():
            await asyncio.wait([self._pump])
        self._fail(self._closed)
        self.runner.release(cache=True)

    async def _run(self) -> None:
        """Compute until no request waits or the engine is paused. One task at a time owns the scheduler."""
        loop = asyncio.get_running_loop()
        try:
            while not self.paused:
                await self._settle()
                if self._arrivals:
                    for request in self._arrivals:
                        self._accept(request)
                    self._arrivals.clear()
                    self.scheduler.drafts.trim(REMEMBERED)  # the engine may never be idle
                if not self.scheduler.busy:
                    self.runner.release()
                    # if results depend on a step's rows, they must not depend on state that a resumed run does not have
                    self.scheduler.drafts.trim(REMEMBERED if self.runner.same_bits else 0)
                    if self.runner.repeats:
                        self.scheduler.pages.forget()
                    return
                for request in await loop.run_in_executor(self.compute, self._compute):
                    self._finish(request)
                for request in tuple(self._open):
                    self._tell(request)
        except Exception as error:
            self._fail(error)

    def _finish(self, request: Request) -> None:
        self._tell(request)
        if request.future.done():
            self.counters.dropped += len(request.tokens)
        else:
            request.future.set_result(request.completion())

    def _tell(self, request: Request) -> None:
        if request.watch is not None and len(request.tokens) > request.told:
            request.watch(request)
            request.told = len(request.tokens)

    async def _settle(self) -> None:
        """Let all callers that are about to send a request do so. A batch then has the same requests in every run of
        the same program, however fast the machine is: floating-point sums depend on the batch, and a resumed run must
        be bit-identical."""
        quiet, known = 0, -1
        while quiet < 8:
            quiet = quiet + 1 if len(self._arrivals) == known else 0
            known = len(self._arrivals)
            await asyncio.sleep(0)

    def _accept(self, request: Request) -> None:
        try:
            self.scheduler.add(request)
        except BirlError as error:
            if not request.future.done():  # the caller may have been cancelled
                request.future.set_exception(error)

    def _fail(self, error: Exception) -> None:
        self._arrivals.clear()
        self.scheduler.clear()
        for request in self._open:
            if not request.future.done():
                request.future.set_exception(error)

    def _compute(self) -> list[Request]:
        """Run steps until a request finishes, a new one arrives, or an eighth of a second has passed (for watched
        requests)."""
        start, before = time.perf_counter(), self.counters.tokens
        watched = any(r.watch for r in tuple(self._open))  # the event loop may add to it meanwhile
        if self.version != self.steps.version:
            self.steps.renew(self.version, self.recompute_kv)
        finished = self.scheduler.retire()
        with torch.no_grad(), self.runner.steady(self.steps.version, self.scheduler.pages):
            while not finished and self.scheduler.busy:
                finished = self.steps.step()
                if self._arrivals or watched or time.perf_counter() - start > 0.125:
                    break
        ended = time.perf_counter()
        self.counters.seconds += ended - start
        figures = {"version": self.steps.version, "tokens": self.counters.tokens - before}
        done("generate", start, ended=ended, process="engine", lane="compute", **figures)
        alive()
        self.counters.running, self.counters.waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        self.counters.reused = self.scheduler.reused
        return finished


def cache_pages(model: nn.Module, max_batch: int, context: int, kv_cache_gb: float) -> int:
    """Pages that fit into a KV cache beside the states of `max_batch` sequences, at most what these can fill."""
    room = max(0, int(kv_cache_gb * 2**30) - max_batch * state_bytes(model))
    return min(room // page_bytes(model), max_batch * pages_for(context))
