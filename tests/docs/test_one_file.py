"""examples/00_grpo_in_one_file.py: the whole algorithm, naive and correct."""

import os
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from birl.named import from_file
from tests.docs.pages import ROOT


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return from_file(ROOT / "examples" / "00_grpo_in_one_file.py")


def test_the_example_trains_what_it_samples(example: ModuleType, tiny: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    end = example.end_ids(model, AutoTokenizer.from_pretrained(tiny))
    assert end == {2}
    prompt = [5, 6, 7, 8]
    torch.manual_seed(0)
    free = example.sample(model, prompt, 8, 10, 0.7, set())
    end = {free[0][0][4]}
    torch.manual_seed(0)
    answers = example.sample(model, prompt, 8, 10, 0.7, end)
    with torch.no_grad():
        for (tokens, old), (whole, _) in zip(answers, free, strict=True):
            stop = next((i + 1 for i, token in enumerate(whole) if token in end), len(whole))
            assert tokens == whole[:stop]
            logp = example.logprobs_of(model, prompt, tokens, 0.7)
            torch.testing.assert_close(logp, torch.tensor(old), atol=1e-5, rtol=0)
    assert len({len(tokens) for tokens, _ in answers}) > 1


def test_the_formulas_of_the_example_are_ours(example: ModuleType) -> None:
    from birl.algorithms import advantages
    from birl.algorithms.surrogates import clip

    rewards = [1.0, 0.0, 0.0, 1.0, 0.5]
    group = torch.zeros(5, dtype=torch.long)
    ours = advantages.scale(advantages.centre(torch.tensor(rewards), group, "group"), group, "group")
    torch.testing.assert_close(torch.tensor(example.advantages(rewards)), ours)
    assert example.advantages([1.0, 1.0]) == [0.0, 0.0] and example.advantages([1.0]) == [0.0]
    logp, old = torch.randn(50), torch.randn(50)
    for advantage in (-1.5, 0.5):
        ones = torch.full((50,), advantage)
        expected = clip(logp, old, ones, torch.arange(50), clip_low=0.2, clip_high=0.2).loss
        torch.testing.assert_close(example.loss_of(logp, old, advantage), expected)
    assert example.reward("9 + 3 = 12", "12") == 1 and example.reward("12 or 13", "12") == example.reward("", "12") == 0


def test_the_example_runs(example: ModuleType, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example.main([*f"--model {tiny} --steps 2 --prompts 2 --group 3 --max-tokens 6 --updates 2".split()])
    assert re.findall(r"step (\d): reward [01]\.\d{3}", capsys.readouterr().out) == ["1", "2"]
    lines = (ROOT / "examples" / "00_grpo_in_one_file.py").read_text().splitlines()
    assert len(lines) <= 120 and not any(re.match(r"(from|import) birl", line) for line in lines)
    assert os.environ.get("TOKENIZERS_PARALLELISM") == "false"
