"""Invariant 1: what the engine says it sampled is what the learner computes."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from birl import kernels
from birl.data.pack import pack
from birl.engine.engine import EmbeddedEngine
from birl.errors import BirlError
from birl.learner.learner import Learner
from birl.models.load import load_model, load_tokenizer
from birl.types import Completion, Sample, SamplingParams, Stop
from tests.tiny import tiny_model_folder

PAGE_BYTES = 2 * 2 * 32 * 32 * 4  # of the tiny model: keys and values, layers, positions, head size, float32
PROMPTS = [tuple(range(5, 5 + n)) for n in (1, 4, 9, 9, 17, 30)]


@pytest.fixture(scope="module", params=["kernels", "plain"])
def tiny(request: pytest.FixtureRequest) -> Path:
    """Both ways through the model: birl's kernels, and PyTorch's operators."""
    return request.getfixturevalue("tiny_kernels" if request.param == "kernels" else "plain")


@pytest.fixture(scope="module")
def tiny_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("kernels") / "model")


class Bench:
    """A learner and an engine over the same module."""

    def __init__(
        self, folder: Path, compute: ThreadPoolExecutor, dtype: torch.dtype = torch.float32, **options: float
    ) -> None:
        self.tokenizer = load_tokenizer(folder)
        temperature = options.pop("temperature", 1.0)
        model = load_model(folder).to(str(options.pop("device", "cpu")))
        self.learner = Learner(model, dtype=dtype, temperature=temperature)
        self.engine = EmbeddedEngine(
            self.learner.model,
            self.tokenizer,
            end_ids=frozenset({2}),
            context=int(options.pop("context", 256)),
            compute=compute,
            version=lambda: self.learner.version,
            **options,  # type: ignore[arg-type]
        )

    def generate(self, prompts: list[tuple[int, ...]], params: list[SamplingParams]) -> list[Completion]:
        async def main() -> list[Completion]:
            return await asyncio.gather(*(self.engine.generate(p, q) for p, q in zip(prompts, params, strict=True)))

        return asyncio.run(asyncio.wait_for(main(), 60))

    def gap(self, prompts: list[tuple[int, ...]], completions: list[Completion]) -> torch.Tensor:
        samples = [
            Sample(
                tokens=p + c.ids,
                mask=(False,) * len(p) + (True,) * len(c.ids),
                logprobs=[0.0] * len(p) + c.logprobs.tolist(),
                versions=[-1] * len(p) + c.versions.tolist(),
                advantage=1.0,
                group=i,
                episode=0,
                support=c.support,
            )
            for i, (p, c) in enumerate(zip(prompts, completions, strict=True))
        ]
        return torch.cat([self.learner.forward(b).cpu() - b.logprobs for b in pack(samples, [1.0] * len(samples), 200)])


def seeded(n: int, **options: object) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=40, seed=100 + i, **options) for i in range(n)]  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_engine_and_learner_agree(tiny: Path, compute: ThreadPoolExecutor, temperature: float) -> None:
    bench = Bench(tiny, compute, temperature=temperature)
    completions = bench.generate(PROMPTS, seeded(len(PROMPTS), temperature=temperature))
    assert bench.gap(PROMPTS, completions).abs().max() <= 1e-5 / temperature  # which divides the logits


@pytest.mark.skipif(bool(kernels.problem()), reason=f"no kernels: {kernels.problem()}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_with_kernels_they_agree_bit_for_bit(
    tiny_kernels: Path, compute: ThreadPoolExecutor, dtype: torch.dtype, temperature: float
) -> None:
    bench = Bench(tiny_kernels, compute, dtype, temperature=temperature)
    prompts = [*PROMPTS, *[tuple(range(3, 100))] * 3]
    completions = bench.generate(prompts, seeded(len(prompts), temperature=temperature))
    assert (bench.gap(prompts, completions) == 0).all()


TRUNCATED: list[dict[str, object]] = [
    {"top_k": 20}, {"top_k": 60, "top_p": 0.8}, {"top_k": 320, "min_p": 0.3}, {"top_k": 1}, {},
    {"top_k": 200, "top_p": 0.95, "min_p": 0.01},
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_they_agree_over_the_words_that_were_kept(
    tiny: Path, compute: ThreadPoolExecutor, dtype: torch.dtype, temperature: float
) -> None:
    """Top-k, top-p and min-p side by side. The learner is told the words: with its own logits it would often keep
    others once it has moved, and its log-probs over all tokens are others anyway."""
    bench = Bench(tiny, compute, dtype, temperature=temperature)
    params = [replace(p, temperature=temperature, support=bool(o), **o)  # type: ignore[arg-type]
              for p, o in zip(seeded(len(PROMPTS)), TRUNCATED, strict=True)]  # fmt: skip
    completions = [c.possible() for c in bench.generate(PROMPTS, params)]
    gap = bench.gap(PROMPTS, completions)
    assert gap.abs().max() <= (0.3 if dtype == torch.bfloat16 and not bench.engine.runner.same_bits else 1e-5)
    if bench.engine.runner.same_bits:
        told = [(p, c) for p, c in zip(PROMPTS, completions, strict=True) if c.support is not None]
        assert (bench.gap([p for p, _ in told], [c for _, c in told]) == 0).all()
    for completion, options in zip(completions, TRUNCATED, strict=True):
        assert (completion.support is not None) == bool(options)
        if completion.support is not None:
            assert completion.support.counts.min() > 0 and completion.support.counts.max() <= int(options["top_k"])  # type: ignore[call-overload]
    whole = [replace(c, support=None) for c in completions]
    assert bench.gap(PROMPTS, whole).abs().mean() > 0.05


def test_given_tokens_say_what_they_were_drawn_from(tiny: Path, compute: ThreadPoolExecutor) -> None:
    """The beginning of an answer that an engine had to give back: it is scored as it was drawn, and goes on as it would
    have. A token that could not have been drawn now counts as drawn from all tokens."""
    bench = Bench(tiny, compute)
    asked = SamplingParams(max_tokens=20, seed=5, top_k=4, top_p=0.9, support=True, ignore_eos=True)
    (answer,) = bench.generate([PROMPTS[2]], [asked])
    (again,) = bench.generate([PROMPTS[2]], [replace(asked, forced=answer.ids[:9])])
    assert again.ids == answer.ids and again.support == answer.support
    assert again.logprobs.tolist() == pytest.approx(answer.logprobs.tolist(), abs=1e-6)
    assert answer.support is not None
    other = next(i for i in range(3, 300) if i not in answer.support.ids[: answer.support.counts[0]])
    (given,) = bench.generate([PROMPTS[2]], [replace(asked, forced=(other,))])
    assert given.possible().support is not None and given.support.counts[0] == 0 < given.support.counts[1]  # type: ignore[union-attr]
    assert bench.gap([PROMPTS[2]], [given]).abs().max() <= 1e-5
    with pytest.raises(BirlError, match="top_k bounds the support"):
        bench.generate([PROMPTS[2]], [replace(asked, top_k=0)])


def test_they_agree_after_training_moved_the_weights(tiny: Path, compute: ThreadPoolExecutor) -> None:
    """The engine has no copy that could be stale: it runs the module that was trained, in bfloat16 too."""
    bench = Bench(tiny, compute, torch.bfloat16)
    before = bench.generate(PROMPTS, seeded(len(PROMPTS)))
    for tensor in bench.learner.masters.tensors.values():
        tensor.grad = torch.randn_like(tensor)
    bench.learner.optim_step(3e-3)
    after = bench.generate(PROMPTS, seeded(len(PROMPTS)))
    assert [c.ids for c in before] != [c.ids for c in after]
    assert {v for c in before for v in c.versions.tolist()} == {0} and {
        v for c in after for v in c.versions.tolist()
    } == {1}
    assert bench.gap(PROMPTS, after).abs().mean() < 0.05
    assert bench.gap(PROMPTS, before).abs().mean() > 0.1


def test_a_result_does_not_depend_on_the_rest_of_the_batch(tiny: Path, compute: ThreadPoolExecutor) -> None:
    bench = Bench(tiny, compute)
    params = seeded(len(PROMPTS))
    together = bench.generate(PROMPTS, params)
    for prompt, param, expected in zip(PROMPTS, params, together, strict=True):
        (alone,) = bench.generate([prompt], [param])
        assert alone.ids == expected.ids
        assert alone.logprobs.tolist() == pytest.approx(expected.logprobs.tolist(), abs=1e-5)


@pytest.mark.parametrize("options", [{"max_batch": 1}, {"max_batch": 2}, {"kv_cache_gb": 3 * PAGE_BYTES / 2**30}])
def test_nor_on_slots_or_preemption(tiny: Path, compute: ThreadPoolExecutor, options: dict[str, float]) -> None:
    """Three pages: the prompt of 30 with its answer of 40 just fits alone, so others are preempted and computed
    again."""
    params = seeded(len(PROMPTS), ignore_eos=True)
    expected = Bench(tiny, compute).generate(PROMPTS, params)
    found = Bench(tiny, compute, **options).generate(PROMPTS, params)  # pyright: ignore
    assert [c.ids for c in found] == [c.ids for c in expected]


def test_a_groups_prompt_is_prefilled_once(
    tiny: Path, compute: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tiny, compute)
    plans: list[list[tuple[int, int]]] = []
    original = bench.engine.runner.run
    monkeypatch.setattr(
        bench.engine.runner,
        "run",
        lambda plan: (plans.append([(len(w.tokens), len(w.samplers)) for w in plan]), original(plan))[1],
    )
    long = tuple(range(3, 73))
    bench.generate([long] * 5 + [PROMPTS[2]] * 2, seeded(7, ignore_eos=True))
    assert plans[0] == [(70, 5), (9, 2)] and plans[1] == [(1, 1)] * 7
    assert bench.engine.counters.prefilled == 79


def test_a_group_of_as_many_answers_as_its_prompt_has_tokens(tiny: Path, compute: ThreadPoolExecutor) -> None:
    """As many rows come out of the model as tokens are drawn, and yet not row by row."""
    bench = Bench(tiny, compute)
    together = bench.generate([PROMPTS[1]] * 4, seeded(4))
    assert bench.gap([PROMPTS[1]] * 4, together).abs().max() <= 1e-5
    assert [c.ids for c in together] == [bench.generate([PROMPTS[1]], [p])[0].ids for p in seeded(4)]


def test_later_answers_reuse_the_pages_of_a_running_one(
    tiny: Path, compute: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tuple(range(3, 73))
    params = seeded(3, ignore_eos=True)
    expected = Bench(tiny, compute).generate([long] * 3, params)
    bench = Bench(tiny, compute, max_batch=2)
    found = bench.generate([long] * 3, [replace(params[0], max_tokens=5), *params[1:]])
    assert found[0].ids == expected[0].ids[:5]
    assert [f.ids for f in found[1:]] == [e.ids for e in expected[1:]]
    assert bench.engine.counters.prefilled == 70 + 6  # the third had two pages of 32 for nothing


def test_long_prompts_go_through_in_pieces(tiny: Path, compute: ThreadPoolExecutor) -> None:
    prompts = [tuple(range(3, 103)), tuple(range(4, 64)), tuple(range(4, 64))]
    expected = Bench(tiny, compute).generate(prompts, seeded(3))
    bench = Bench(tiny, compute)
    bench.engine.scheduler.prefill = 33
    found = bench.generate(prompts, seeded(3))
    assert [c.ids for c in found] == [c.ids for c in expected]
    assert bench.gap(prompts, found).abs().max() <= 1e-5


def test_stops(tiny: Path, compute: ThreadPoolExecutor) -> None:
    bench = Bench(tiny, compute, context=48)
    (free,) = bench.generate([PROMPTS[2]], [SamplingParams(max_tokens=30, seed=1, ignore_eos=True)])
    assert len(free.ids) == 30 and free.stop is Stop.LENGTH
    (cut,) = bench.generate([PROMPTS[5]], [SamplingParams(max_tokens=30, seed=1, ignore_eos=True)])
    assert len(cut.tokens) == 18 and cut.stop is Stop.LENGTH
    (full,) = bench.generate([tuple(range(3, 60))], [SamplingParams(max_tokens=30, seed=1)])
    assert full.ids == () and full.stop is Stop.LENGTH
    (by_id,) = bench.generate(
        [PROMPTS[2]], [SamplingParams(max_tokens=30, seed=1, ignore_eos=True, stop_ids=(free.ids[4],))]
    )
    assert by_id.ids == free.ids[: free.ids.index(free.ids[4]) + 1] and by_id.stop is Stop.STOP
    text = bench.tokenizer.decode(free.ids[6:9])  # pyright: ignore
    (by_text,) = bench.generate([PROMPTS[2]], [SamplingParams(max_tokens=30, seed=1, ignore_eos=True, stop=(text,))])  # pyright: ignore
    assert by_text.stop is Stop.STOP and by_text.ids == free.ids[: len(by_text.ids)]
    assert text in bench.tokenizer.decode(by_text.ids)  # pyright: ignore


def test_the_end_token_is_part_of_the_answer_only_when_it_was_sampled(tiny: Path, compute: ThreadPoolExecutor) -> None:
    """EasyRL's defects: the end token never trained as pad == eos, and appended to answers that were cut."""
    bench = Bench(tiny, compute)
    with torch.no_grad():
        bench.learner.model.lm_head.weight[2] *= 3  # type: ignore[union-attr]
    completions = bench.generate(PROMPTS * 4, seeded(4 * len(PROMPTS)))
    assert {c.stop for c in completions} == {Stop.STOP, Stop.LENGTH}
    for c in completions:
        assert (c.ids[-1] == 2) == (c.stop is Stop.STOP)
        assert 2 not in c.ids[:-1]


async def test_impossible_requests_are_refused_and_others_go_on(tiny: Path, compute: ThreadPoolExecutor) -> None:
    bench = Bench(tiny, compute, kv_cache_gb=2 * PAGE_BYTES / 2**30)
    good = asyncio.create_task(bench.engine.generate(PROMPTS[1], SamplingParams(max_tokens=5, seed=1)))
    with pytest.raises(BirlError, match=r"engine\.kv_cache_gb"):
        await bench.engine.generate(PROMPTS[5], SamplingParams(max_tokens=40, seed=1))
    with pytest.raises(BirlError, match="prompt is empty"):
        await bench.engine.generate((), SamplingParams(max_tokens=5))
    assert (await good).ids


async def test_cancelling_the_caller_frees_the_slot(tiny: Path, compute: ThreadPoolExecutor) -> None:
    bench = Bench(tiny, compute, max_batch=1)
    long = asyncio.create_task(bench.engine.generate(PROMPTS[1], SamplingParams(max_tokens=200, ignore_eos=True)))
    await asyncio.sleep(0.05)
    long.cancel()
    assert (await bench.engine.generate(PROMPTS[2], SamplingParams(max_tokens=3, seed=1))).ids
    await bench.engine.close()


def test_a_broken_forward_reaches_every_caller(
    tiny: Path, compute: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tiny, compute)
    with monkeypatch.context() as patch:
        patch.setattr(bench.engine.runner, "run", lambda plan: 1 / 0)

        async def main() -> list[object]:
            calls = (bench.engine.generate(p, SamplingParams(max_tokens=3)) for p in PROMPTS)
            return await asyncio.gather(*calls, return_exceptions=True)

        assert all(isinstance(e, ZeroDivisionError) for e in asyncio.run(asyncio.wait_for(main(), 60)))
    assert bench.generate(PROMPTS, seeded(len(PROMPTS)))


def test_where_a_grammar_allows_nothing_the_answer_is_aborted(tiny: Path, compute: ThreadPoolExecutor) -> None:
    """It ended with a token that was not allowed, and said that it was complete."""

    class GivenUp:
        left = 3

        def allowed(self, words: int) -> np.ndarray:
            return np.full(words, self.left > 0)

        def take(self, token: int) -> bool:
            self.left -= 1
            return self.left < 0  # the library takes no token that it has not allowed

    engine = Bench(tiny, compute).engine
    guide: Any = GivenUp()
    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
    answer = asyncio.run(asyncio.wait_for(engine.generate(PROMPTS[1], params, guide=guide), 60))
    assert (len(answer.tokens), answer.stop) == (3, Stop.ABORT)
