"""Architectures of transformers are right, or refused by name. `make models` measures all of them."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig

from birl.errors import BirlError
from birl.models import layer_rules, twin
from birl.models.heads import AfterHead, after_head
from birl.models.logprobs import token_logprobs
from birl.models.slices import quantize
from birl.models.verify import verify
from birl.models.vision import FAMILIES
from tests.models import sweep
from tests.models.sweep import NONE, PAGE, Bench, measured, trained, written
from tests.zoo import KINDS, LEFT_OUT, build

#: sinks and windows; caps of scores and logits; a factor of logits and windows; chunks, none and rotary by layer; MLA;
#: larger heads in some layers; states: a convolution, Gated DeltaNet, Mamba 2
QUICK = ("gpt_oss", "gemma2", "cohere2", "llama4_text", "deepseek_v2", "gemma4_text", "lfm2", "qwen3_5_text", "bamba")
REFUSED = {
    "deepseek_v32": "layer 0 is of the kind indexed_attention",
    "bloom": r"adds a bias by distance to every score \(alibi\)",
    "rwkv": "each of its blocks keeps two states",
    "qwen4_exp_text": "an indexer chooses the keys of each query",
    "xglm": r"XGLMAttention \(model\.layers\.0\.self_attn\) lets tokens see one another",
    "bart": r"BartLearnedPositionalEmbedding \(model\.decoder\.embed_positions\) counts a token's place",
    "bert": "BertSelfAttention wants attention that birl has no rule for: later tokens are seen",
    "doge": "DogeAttention wants attention that birl has no rule for: a mask of its own",
}


@pytest.fixture(autouse=True)
def proofs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(twin, "cache_folder", lambda name: tmp_path)


@pytest.mark.parametrize("kind", QUICK)
def test_what_is_accepted_is_right(kind: str) -> None:
    result = measured(kind)
    assert not any(result[column] for column in ("sampled", "trained", "trees", "LoRA", "exported"))
    assert result["rope"] in ("", NONE)


CONFIGURED = [
    ("deepseek_v3", {"n_shared_experts": 0}),  # whose matrices have no rows
    ("phimoe", {"sliding_window": 8}),  # which its mask alone has
    ("jetmoe", {"num_experts_per_tok": 1}),  # as many rows as tokens, sorted by expert
    ("hyperclovax", {"logits_scaling": 0.125}),  # a factor; Granite's is a divisor
    ("recurrent_gemma", {"block_types": ["recurrent", "recurrent", "attention"]}),
    ("exaone4", {"sliding_window": 4, "sliding_window_pattern": 2}),
    ("gpt2", {}),  # places that are learned
    ("gpt_neox", {}),
]


@pytest.mark.parametrize(("kind", "options"), CONFIGURED)
def test_configurations_that_differ_are_right(kind: str, options: dict[str, Any]) -> None:
    model = build(kind, **options)
    verify(model)
    assert not trained(Bench(model), sweep.rows(groups=2, episodes=2))


@pytest.mark.parametrize(
    ("kind", "width"), [("deepseek_v3", "n_shared_experts"), ("qwen2_moe", "shared_expert_intermediate_size")]
)
def test_shared_experts_without_features_are_sampled_and_adapted(kind: str, width: str) -> None:
    """oneDNN refuses to lay out their matrices."""
    model = build(kind, **{width: 0})
    assert any(not p.numel() for p in model.parameters())
    assert not sweep.adapted(model)
    assert quantize(build(kind, **{width: 0}), "nf4")


@pytest.mark.parametrize(
    ("kind", "layers"), [("deepseek_v3", 4), ("jamba", 5), ("recurrent_gemma", 3), ("llama4_text", 4), ("llama", 2)]
)
def test_a_twin_has_layers_of_each_kind(kind: str, layers: int) -> None:
    """By periods and numbers of first layers too: the proof of DeepSeek-V3 was one of dense layers."""
    assert twin.shrunk(AutoConfig.for_model(kind)).num_hidden_layers == layers


def test_the_page_has_a_row_for_each() -> None:
    """Of the version of transformers that it names."""
    page = PAGE.read_text(encoding="utf-8")
    if f"of transformers {transformers.__version__.rpartition('.')[0]}," not in page:
        pytest.skip(f"docs/models.md is not of transformers {transformers.__version__}")
    page, _, pictures = page.partition("## Pictures")
    assert all(f"\n| {kind} |" in pictures for kind in FAMILIES), "run `make models`"
    rows = re.findall(r"^\| ([\w.-]+) \|", page, re.MULTILINE)
    assert sorted(rows) == sorted([*KINDS, *LEFT_OUT]), "run `make models`"
    accepted = page.partition("## Refused")[0]
    assert all(f"\n| {kind} | yes | yes | yes | yes |" in accepted for kind in QUICK)
    assert not any(f"\n| {kind} |" in accepted for kind in REFUSED)


def test_the_page_can_be_read_again() -> None:
    page = PAGE.read_text(encoding="utf-8")
    head, _, rest = sweep.page(*written(page)).partition("\n| model type |")
    assert head and page.endswith(f"\n| model type |{rest}")


@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_no_rule_is_refused_by_name(kind: str) -> None:
    with pytest.raises(BirlError, match=REFUSED[kind]):
        verify(build(kind))


@pytest.mark.parametrize("scale", [0.0, 1e-6, 1.0])
def test_small_weights_hide_nothing(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with a state that birl has no rule for."""
    model: Any = build("rwkv")
    monkeypatch.setattr(layer_rules, "REASONS", {})
    with torch.no_grad():
        for block in model.rwkv.blocks:
            for parameter in block.attention.parameters():
                parameter *= scale
    with pytest.raises(BirlError, match=r"ZeroPad2d \(rwkv\.blocks\.0\.attention\.time_shift\) lets tokens see"):
        verify(model)


class Unknown(torch.nn.Module):
    """LFM2's short convolution under a name that birl has no rule for."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.into, self.conv, self.out = own.in_proj, own.conv, own.out_proj

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        b, c, x = self.into(hidden_states).transpose(-1, -2).chunk(3, dim=-2)
        return self.out((c * self.conv(b * x)[..., : x.shape[-1]]).transpose(-1, -2))


@pytest.mark.parametrize("scale", [0.0, 1e-6, 1.0, 1e3])
def test_a_convolution_without_a_rule_is_refused_at_any_scale(scale: float) -> None:
    model: Any = build("lfm2")
    model.model.layers[0].conv = Unknown(model.model.layers[0].conv)
    with torch.no_grad():
        for parameter in model.model.layers[0].conv.parameters():
            parameter *= scale
    with pytest.raises(BirlError, match=r"Unknown \(model\.layers\.0\.conv\) lets tokens see"):
        verify(model)


def test_a_factor_that_a_model_does_not_read_is_none() -> None:
    """transformers keeps every key of a config.json, whether or not the architecture knows it."""
    assert after_head(build("llama", logit_scale=0.5, final_logit_softcapping=3.0)) is None
    assert after_head(build("cohere", logit_scale=0.5)) == AfterHead(scale=0.5)
    assert after_head(build("granite", logits_scaling=4.0)) == AfterHead(scale=0.25)
    assert after_head(build("hyperclovax", logits_scaling=0.125)) == AfterHead(scale=0.125)
    assert after_head(build("gemma2", final_logit_softcapping=3.0)) == AfterHead(cap=3.0)


@pytest.mark.parametrize("after", [AfterHead(scale=0.3), AfterHead(cap=2.0), AfterHead(scale=3.0, cap=2.0)])
def test_log_probs_behind_a_factor_or_cap_have_autograds_gradient(after: AfterHead) -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(23, 8, requires_grad=True), torch.nn.Linear(8, 50)
    targets, by = torch.randint(0, 50, (23,)), torch.randn(2, 23)
    inputs = hidden, head.weight, head.bias
    x = head(hidden) * after.scale
    logp = (x if after.cap is None else after.cap * torch.tanh(x / after.cap)).div(0.7).log_softmax(-1)
    expected = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    given = token_logprobs(hidden, head, targets, 0.7, chunk=250, after=after)
    for ours, theirs in zip(given, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    gradients = [torch.autograd.grad(sum(g * w for g, w in zip(x, by, strict=True)).sum(), inputs)  # pyright: ignore
                 for x in (given, expected)]  # type: ignore[union-attr]  # fmt: skip
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
