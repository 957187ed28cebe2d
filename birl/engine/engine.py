"""The embedded engine: continuous batching over the module that the learner trains. No second copy of the weights, no
sync.

    generate() --adds--> Scheduler.waiting --plan--> running --run, sample--> finished --resolves--> generate()
    (event loop)                            (compute thread, one for the whole process)           (event loop)

A token depends on its request's weights, context and random number alone. Whatever makes it faster (batches, shared
prompts, guessed tokens, preemption) is not allowed to change it.

Everything that computes runs on one thread, the learner's: the two never run at once, and CPU threads are not shared
out twice.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from birl.engine.drafts import REMEMBERED, Drafts
from birl.engine.graphs import AHEAD
from birl.engine.pages import Pages, pages_for
from birl.engine.request import Request
from birl.engine.runner import Runner, page_bytes
from birl.engine.sampler import sample
from birl.engine.scheduler import Scheduler, Work
from birl.errors import BirlError
from birl.text.chat import StopChecker
from birl.types import Completion, SamplingParams, Stop


@dataclass(slots=True)
class Counters:
    tokens: int = 0  # sampled
    prefilled: int = 0  # prompt tokens that were computed: those of a group once
    drafted: int = 0  # tokens that were guessed (`engine/drafts.py`),
    accepted: int = 0  # and those of them that were right
    seconds: float = 0.0  # spent computing
    running: int = 0
    finished: int = 0


class EmbeddedEngine:
    """Implements `birl.types.Engine`.

    `version` is asked for at every step, and stamped on the tokens of that step. `context` is the longest sequence
    [tokens], `kv_cache_gb` the memory for keys and values [GiB].
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_ids: frozenset[int],
        context: int,
        compute: Executor,
        version: Callable[[], int] = lambda: 0,
        max_batch: int = 64,
        kv_cache_gb: float = 1.0,
        draft_rows: int = 16,
    ) -> None:
        self.tokenizer, self.end_ids, self.context = tokenizer, end_ids, context
        self.compute, self._version = compute, version
        self.runner = Runner(model)
        pages = min(int(kv_cache_gb * 2**30) // page_bytes(model), max_batch * pages_for(context))
        on_cpu = next(model.parameters()).device.type == "cpu"  # a GPU launches captured graphs instead of guessing
        self.scheduler = Scheduler(max_batch=max_batch, pages=Pages(pages), drafts=Drafts(draft_rows if on_cpu else 0))
        self.counters = Counters()
        self._arrivals: list[Request] = []
        self._open: set[Request] = set()  # everybody who waits for a completion
        self._pump: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        return self._version()

    async def generate(self, prompt_ids: tuple[int, ...], params: SamplingParams, session: str = "") -> Completion:
        """Sample one answer. A prompt that fills the context gives an empty completion that ended for its length.

        Cancelling the caller aborts the request. Raises `BirlError` when the KV cache could not hold it.
        """
        room = min(params.max_tokens, self.context - len(prompt_ids))
        if not prompt_ids:
            raise BirlError("The prompt is empty: there is nothing to predict the first token from.")
        if room <= 0:
            return Completion(tokens=(), logprobs=(), versions=(), stop=Stop.LENGTH)
        request = Request(
            prompt=prompt_ids,
            params=params,
            max_tokens=room,
            end_ids=frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else self.end_ids),
            checker=StopChecker(self.tokenizer, params.stop) if params.stop else None,
            future=asyncio.get_running_loop().create_future(),
            session=session,
        )
        self._arrivals.append(request)
        self._open.add(request)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
        try:
            return await request.future
        except asyncio.CancelledError:
            request.aborted = True
            raise
        finally:
            self._open.discard(request)

    async def close(self) -> None:
        if self._pump is not None and not self._pump.done():
            for request in self._open:
                request.aborted = True
            await asyncio.wait([self._pump])
        self.runner.release()

    async def _run(self) -> None:
        """Compute until nobody waits. One task at a time owns the scheduler."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._settle()
                for request in self._arrivals:
                    self._accept(request)
                self._arrivals.clear()
                if not self.scheduler.busy:
                    self.runner.release()
                    # where bits depend on a step's rows, these must not depend on what a resumed run has not seen
                    self.scheduler.drafts.trim(REMEMBERED if self.runner.same_bits else 0)
                    return
                for request in await loop.run_in_executor(self.compute, self._compute):
                    if not request.future.done():
                        request.future.set_result(request.completion())
        except Exception as error:
            self._fail(error)

    async def _settle(self) -> None:
        """Let everybody who is about to ask do so. A batch then holds the same requests in every run of the same
        program, however fast the machine is: floating-point sums depend on the batch, and a resumed run must give the
        same bits."""
        quiet, known = 0, -1
        while quiet < 8:
            quiet = quiet + 1 if len(self._arrivals) == known else 0
            known = len(self._arrivals)
            await asyncio.sleep(0)

    def _accept(self, request: Request) -> None:
        try:
            self.scheduler.add(request)
        except BirlError as error:
            request.future.set_exception(error)

    def _fail(self, error: Exception) -> None:
        self._arrivals.clear()
        self.scheduler.clear()
        for request in self._open:
            if not request.future.done():
                request.future.set_exception(error)

    def _compute(self) -> list[Request]:
        """Steps until a request has finished, or a new one came, or an eighth of a second is over (for those who
        watch)."""
        start = time.perf_counter()
        finished: list[Request] = []
        with torch.no_grad(), self.runner.steady(self.version, self.scheduler.pages):
            while not finished and self.scheduler.busy:
                finished = self.step()
                if self._arrivals or time.perf_counter() - start > 0.125:
                    break
        self.counters.seconds += time.perf_counter() - start
        return finished

    def step(self) -> list[Request]:
        """One token for every running request; more where guesses were right, or where that needs no decision of ours.
        Returns those that ended."""
        plan = self.scheduler.plan()
        if self.runner.bursts(plan):
            self.burst(plan)
        elif plan:
            self.single(plan)
        finished = self.scheduler.retire()
        self.counters.running = len(self.scheduler.running)
        self.counters.finished += len(finished)
        return finished

    def single(self, plan: list[Work]) -> None:
        """One forward pass."""
        draws = [(r, len(work.drafts) + 1) for work in plan for r in work.samplers]  # who, and how many tokens
        logits = self.runner.run(plan)
        for work in plan:
            work.request.computed += len(work.tokens)
            self.counters.prefilled += len(work.tokens) if work.start < len(work.request.prompt) else 0
        if draws:
            params, uniforms = (
                [r.params for r, n in draws for _ in range(n)],
                [u for r, n in draws for u in r.uniforms(n)],
            )
            tokens, logprobs = sample(logits, params, uniforms, self.runner.kernels)
            drawn = zip(tokens.tolist(), logprobs.tolist(), strict=True)
            for work in plan:
                self.append(work, [[next(drawn) for _ in range(len(work.drafts) + 1)] for _ in work.samplers])

    def append(self, work: Work, drawn: list[list[tuple[int, float]]]) -> None:
        """What each of the samplers drew: its next token, and the ones after as far as the guesses were right."""
        for request, (first, *later) in zip(work.samplers, drawn, strict=True):
            request.append(*first, self.version)
            right = 0
            for guess, found in zip(work.drafts, later, strict=True):
                if request.tokens[-1] != guess or request.stop is not None:
                    break
                request.append(*found, self.version)
                right += 1
            request.computed += right
            if work.drafts:
                self.scheduler.drafts.judge(request, right)
            self.counters.tokens += right + 1
            self.counters.drafted += len(work.drafts)
            self.counters.accepted += right

    def burst(self, plan: list[Work]) -> None:
        """Some tokens for each, by captured graphs; what was sampled behind an end is dropped."""
        made = self.runner.burst(plan, self.scheduler.look_ahead(plan, AHEAD))
        for work, tokens, logprobs in zip(plan, *made, strict=True):
            for token, logprob in zip(tokens, logprobs, strict=True):
                work.request.append(token, logprob, self.version)
                work.request.computed += 1
                self.counters.tokens += 1
                if work.request.stop is not None:
                    break
