import torch
from hypothesis import given

from birl.algorithms.segments import ends, positions, segment_mean, segment_sum, starts, totals
from tests.algorithms.cases import Tokens, close, double, gradient_of, ids, tokens


@given(case=tokens())
def test_segments_are_loops_over_samples(case: Tokens) -> None:
    values, sample = double(case.logp), ids(case.sample)
    sums = [sum(case.logp[t] for t in run) for run in case.runs()]
    close(totals(values, sample), sums)
    close(segment_sum(values, sample), [s for s, n in zip(sums, case.lengths, strict=True) for _ in range(n)])
    close(segment_mean(values, sample), [s / n for s, n in zip(sums, case.lengths, strict=True) for _ in range(n)])
    assert positions(sample).tolist() == [i for i, n in enumerate(case.lengths) for _ in range(n)]
    assert starts(sample).tolist() == [t == run[0] for run in case.runs() for t in run]
    assert ends(sample).tolist() == [t == run[-1] for run in case.runs() for t in run]


@given(case=tokens())
def test_gradient_of_a_mean_reaches_every_token_of_the_sample(case: Tokens) -> None:
    values = double(case.logp).requires_grad_()
    weight = case.uniform(0, 1)
    found = gradient_of(segment_mean(values, ids(case.sample)) * double(weight), values)
    close(found, [sum(weight[u] for u in run) / len(run) for run in case.runs() for _ in run])


def test_dtype_follows_the_input() -> None:
    for dtype in (torch.float32, torch.float64):
        assert segment_mean(torch.zeros(3, dtype=dtype), torch.tensor([4, 4, 9])).dtype == dtype
