"""Tensor parallelism: every number is that of one rank, whatever is split over the others."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from birl.data.pack import Batch, pack
from birl.errors import BirlError
from birl.learner.learner import Learner, Stats
from birl.models import attention
from birl.models.fused_decoder import apart, over_heads
from birl.models.heads import add_score_head
from birl.parallel.context import check_heads
from birl.parallel.ranks import Grid, Ranks
from birl.parallel.tensor import check
from tests.data.test_pack import groups
from tests.parallel.processes import on_ranks
from tests.parallel.test_learner import Outcome, same, trained
from tests.zoo import build

#: AdamW turns rounding errors of a gradient g into lr * error / (|g| + eps): with the usual 1e-8 that is not 1e-5
EPS = 1e-5
SIZES: dict[str, Any] = {
    "vocab_size": 321,  # no multiple of anything
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
    "pad_token_id": None,
}
GLOBAL: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 16, "num_global_key_value_heads": 1,
    "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
}  # fmt: skip
NO_CAPS = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **{"moe_intermediate_size": 16, "num_experts_per_tok": 2},
}
LATENT = {
    **{"n_group": 1, "topk_group": 1, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16},
    **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
}
MODELS: dict[str, dict[str, Any]] = {
    "many heads": {"model_type": "llama", "num_key_value_heads": 4},
    "llama": {"model_type": "llama"},
    "llama untied, with biases": {
        "model_type": "llama", "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True,
    },
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "mistral with a window": {"model_type": "mistral", "sliding_window": 16, "tie_word_embeddings": False},
    "gemma": {"model_type": "gemma"},
    "gemma2": {"model_type": "gemma2", "sliding_window": 16, **NO_CAPS},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 16},
    "hunyuan": {"model_type": "hunyuan_v1_dense"},
    "lfm2": {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "phi3": {"model_type": "phi3", "sliding_window": 16},
    "glm4": {"model_type": "glm4"},
    "experts": {"model_type": "glm4_moe", "first_k_dense_replace": 1, **EXPERTS, "n_group": 1, "topk_group": 1},
    "experts and states": {
        "model_type": "lfm2_moe", "layer_types": ["conv", "full_attention"], "num_dense_layers": 0, **EXPERTS,
    },
    "norms over all heads": {"model_type": "olmo2"},
    "latent attention": {"model_type": "deepseek_v3", "first_k_dense_replace": 1, **EXPERTS, **LATENT},
    "joined and states": {
        "model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"], "shared_intermediate_size": 24,
        "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, **EXPERTS,
    },
    "sinks": {"model_type": "gpt_oss", "sliding_window": 16, **EXPERTS},
    "states": {
        "model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
}  # fmt: skip


def made(name: str) -> nn.Module:
    """A small random model of an architecture; biases are random, too."""
    options = {**SIZES, **MODELS[name]}
    config = CONFIG_MAPPING[options.pop("model_type")](**options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                nn.init.normal_(parameter, parameter.mean().item(), 0.1)
    return model


def trained_on(ranks: Ranks, name: str, options: dict[str, Any]) -> Outcome:
    return trained(ranks, {"model": made(name), "eps": EPS, **options})


def both_ways(ranks: Ranks, name: str, options: dict[str, Any]) -> list[Outcome]:
    """With sequence-parallel regions, and without."""
    return [
        trained_on(Ranks(replace(ranks.grid, sequence=sequence), ranks.mesh), name, options)
        for sequence in (True, False)
    ]


GRIDS = [Grid(tp=2), Grid(tp=4), Grid(fsdp=2, tp=2), Grid(ddp=2, tp=2), Grid(cp=2, tp=2)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_split_layers_change_no_number(grid: Grid) -> None:
    options = {"gradient_checkpointing": grid.fsdp > 1}
    alone = trained_on(Ranks(), "many heads", {})
    for found in on_ranks(grid, both_ways, "many heads", options):
        for outcome in found:
            same(outcome, alone, 1e-5)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "many heads"])
def test_of_every_family(name: str) -> None:
    alone = trained_on(Ranks(), name, {})
    near = 1e-4 if name == "states" else 1e-5  # rounding grows with its steep gradients
    for found in on_ranks(Grid(tp=2), both_ways, name, {}):
        for outcome in found:
            same(outcome, alone, near)


def test_bfloat16_is_as_far_from_float32_as_on_one_rank() -> None:
    """Sums over ranks are rounded, too. Measured: 0.0199 and 0.0197 nats, on one rank 0.0185."""
    exact, one = trained_on(Ranks(), "llama", {}), trained_on(Ranks(), "llama", {"dtype": torch.bfloat16})
    bound = 1.5 * (one.logprobs[0] - exact.logprobs[0]).abs().mean()
    assert bound > 0
    for found in on_ranks(Grid(tp=2), both_ways, "llama", {"dtype": torch.bfloat16}):
        for outcome in found:
            assert (outcome.logprobs[0] - exact.logprobs[0]).abs().mean() < bound
            assert outcome.losses == pytest.approx(exact.losses, abs=0.02)
            assert outcome.norms == pytest.approx(exact.norms, rel=0.02)


def valued(logp: torch.Tensor, entropy: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The policy's loss and the critic's on its backbone; or, of scores, the critic's alone."""
    said = logp if batch.predicted is None else batch.predicted
    policy = 0.0 if batch.predicted is None else logp * batch.advantages
    return ((0.5 * (said - batch.advantages).square() - policy) * batch.weights).sum(), {"said": said}


def critic(ranks: Ranks, name: str) -> dict[str, Any]:
    """A score head (`score` in the place of the language model's, `value` beside it): trained for three steps, then
    what it says, and what a frozen copy says."""
    model = made("llama untied, with biases")
    add_score_head(model, 0, name)
    learner = Learner(model, ranks=ranks, dtype=torch.float32, max_grad_norm=0.5, eps=EPS)
    stats, norms = Stats(), []
    for step in range(3):
        samples = groups(step + 3)
        work = pack(samples, [1 / len(samples)] * len(samples), 80, parts=ranks.shares)
        learner.learn([(batch, valued) for batch in work], stats)
        norms.append(learner.optim_step(1e-3))
    batches = pack(groups(9), [0.0] * len(groups(9)), 1000, parts=ranks.shares)
    said = torch.cat(learner.ranks.each(batches, learner.forward if name == "score" else learner.values))
    frozen = made("llama untied, with biases")
    add_score_head(frozen, 0, name)
    frozen = Learner(frozen, ranks=ranks, dtype=torch.float32, trainable=False)
    before = torch.cat(frozen.ranks.each(batches, frozen.forward))
    weight = learner.weights()[f"{name}.weight"]
    whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return {"loss": stats.loss, "norms": norms, "said": said, "before": before, "head": whole.detach().clone()}


@pytest.mark.parametrize("name", ["score", "value"])
def test_critics_and_frozen_models(name: str) -> None:
    alone = critic(Ranks(), name)
    for grid in (Grid(tp=2), Grid(fsdp=2, tp=2)):
        for found in on_ranks(grid, critic, name):
            assert found["loss"] == pytest.approx(alone["loss"], abs=1e-5)
            assert found["norms"] == pytest.approx(alone["norms"], rel=1e-5)
            torch.testing.assert_close(found["head"], alone["head"], atol=1e-5, rtol=1e-5)
            for key in ("said", "before"):
                torch.testing.assert_close(found[key].sort()[0], alone[key].sort()[0], atol=1e-4, rtol=1e-4)


def kept_for_backward(ranks: Ranks, checkpointing: bool) -> list[int]:
    """Bytes that autograd keeps for one micro-batch, but for weights: with sequence-parallel regions, and without."""
    found = []
    for sequence in (True, False):
        place = Ranks(replace(ranks.grid, sequence=sequence), ranks.mesh)
        learner = Learner(made("llama"), ranks=place, dtype=torch.float32, gradient_checkpointing=checkpointing)
        (batch,) = pack(groups(30), [0.0] * len(groups(30)), 1000)
        storages = {}

        def keep(tensor: torch.Tensor, storages: dict[int, torch.Tensor] = storages) -> torch.Tensor:
            if not isinstance(tensor, nn.Parameter):
                storages[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            learner.outputs(batch)
        found.append(sum(tensor.untyped_storage().nbytes() for tensor in storages.values()))
    return found


@pytest.mark.parametrize(("checkpointing", "share"), [(False, 0.87), (True, 0.62)])
def test_sequence_parallel_regions_take_less_memory(checkpointing: bool, share: float) -> None:
    """Measured: 202 of 236 KB without gradient checkpointing, 27 of 45 KB with it, when layers' inputs are most."""
    for split, whole in on_ranks(Grid(tp=2), kept_for_backward, checkpointing):
        assert split < share * whole


@pytest.mark.parametrize(
    ("options", "tp", "said"),
    [
        ({"num_attention_heads": 2}, 4, "parallel.tp=4 does not divide the 2 query heads"),
        ({}, 4, r"parallel.tp=4 does not divide the 2 key/value heads of this model \(llama\).*a divisor of 2"),
        ({"intermediate_size": 50, "num_key_value_heads": 4}, 4, "the 50 inner features"),
    ],
)
def test_heads_are_not_cut(options: dict[str, Any], tp: int, said: str) -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **options}))  # pyright: ignore
    with pytest.raises(BirlError, match=said):
        check(model, tp)


def test_heads_are_counted_in_what_attention_is_given() -> None:
    """transformers ignores the key heads of GPT-NeoX's config, and Gemma 4's full layers have heads of their own."""
    sizes = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 3}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["gpt_neox"](**sizes))
    check_heads(model, Ranks(Grid(cp=4, context="ulysses")))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["gemma4_text"](**SIZES, **GLOBAL))
    with pytest.raises(BirlError, match=r"parallel.tp=2 does not divide the 1 key/value heads"):
        check(model, 2)


def test_norms_over_all_heads_are_known_to_fused_layers() -> None:
    """These compute with a rank's part alone; Nanochat's norms have no weights."""
    apart(build("nanochat"), 2)
    kinds = ("olmo2", "olmoe", "qwen3", "llama")
    assert [over_heads(build(kind).base_model.layers[0]) for kind in kinds] == [True, True, False, False]


def test_what_nobody_knows_to_split_is_refused() -> None:
    with pytest.raises(BirlError, match=r"layers\.1\.self_attn\.g_proj of BailingHybridModel is nothing that birl can"):
        check(build("bailing_hybrid"), 2)
    with pytest.raises(BirlError, match=r"birl knows no layers of GPT2LMHeadModel that ranks could share out"):
        check(build("gpt2"), 2)


@pytest.mark.parametrize("kind", ["gpt_oss", "gemma2"])
def test_what_no_piece_computes_is_refused(kind: str) -> None:
    model = build(kind)
    check(model, 2)
    with pytest.raises(BirlError, match=r"parallel\.cp=2: the attention of \w+ has sinks, a soft cap or chunks"):
        check_heads(model, Ranks(Grid(cp=2)))
