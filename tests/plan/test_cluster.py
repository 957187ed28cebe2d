import json
import re
from dataclasses import fields, replace
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from birl.cli import main
from birl.errors import BirlError
from birl.learner.adamw8bit import stored
from birl.models.shape import KNOWN, Shape, shape_of
from birl.plan.cluster import KINDS, Layout, Workload, check, cluster_of, layouts
from birl.plan.cluster_command import USABLE, best
from birl.plan.rank_memory import Passes, attention_workspace, memory
from birl.plan.step import step
from tests.plan.published import efficiency, rows, table
from tests.tiny import tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"
WORK = Workload(batch=2**22, microbatch=8192, sequence=4096)


def test_the_table_of_the_page_is_computed() -> None:
    told = [line for line in PAGE.read_text().splitlines() if re.match(r"\| .* \| .* \| [\d,]+ x ", line)]
    assert told == table()
    sources = json.loads((Path(__file__).with_name("published.json")).read_text())["sources"]
    assert {row.source for row in rows()} == set(sources)


@pytest.mark.parametrize("axes", [{"fsdp": 8}, {"fsdp": 4, "cp": 2}, {"tp": 8}], ids=str)
def test_replicas_take_no_longer_for_more_micro_batches(axes: dict[str, int]) -> None:
    """Their gradients are summed once a step, whatever else is split."""
    layout, shape, cluster = Layout(ddp=2, **axes), KNOWN["llama3-8b"], cluster_of("h100", 16)
    one, four = (step(shape, cluster, layout, replace(WORK, batch=n * 8192 * layout.shares)) for n in (1, 4))
    assert one.exposed["ddp"] == four.exposed["ddp"] > 0


@pytest.mark.parametrize("gpu", ["a100-80", "h100"])
def test_the_one_constant_is_a_median(gpu: str) -> None:
    """Of all dense rows of that hardware, rounded to 0.05; no row moves it by itself."""
    assert KINDS[gpu]["efficiency"] == pytest.approx(efficiency(gpu), abs=0.025)
    found = [row.efficiency() for row in rows() if row.gpu == gpu and not row.shape.experts]
    for i in range(len(found)):
        assert median(found[:i] + found[i + 1 :]) == pytest.approx(KINDS[gpu]["efficiency"], abs=0.05)


def test_errors_are_bounded() -> None:
    off = {f"{row.name} {row.cluster.gpus}": abs(row.off) for row in rows()}
    assert max(off.values()) < 0.32 and median(off.values()) < 0.12, off
    for row in rows():
        if row.memory:
            assert row.our_memory == pytest.approx(row.memory, rel=0.1)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen2.5-7b", 7.616),
        ("qwen2.5-32b", 32.76),
        ("qwen2.5-72b", 72.71),
        ("llama3-8b", 8.030),
        ("llama3-70b", 70.55),
        ("llama3-405b", 405.85),
        ("qwen3-30b-a3b", 30.53),
        ("qwen3-235b-a22b", 235.1),
        ("deepseek-v3", 671.0),
    ],
)
def test_parameters_of_known_models(name: str, billions: float) -> None:
    assert KNOWN[name].parameters / 1e9 == pytest.approx(billions, rel=1e-3)


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen2": {"num_key_value_heads": 4},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 32},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96},
    "falcon": {"ffn_hidden_size": 256},
    "gpt_neox": {"num_key_value_heads": 1},
    "nemotron": {"num_key_value_heads": 2},
    "phi": {"num_key_value_heads": 2},
    "deepseek_v3": {
        **{"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 96},
        **{"first_k_dense_replace": 1, "q_lora_rank": 64, "kv_lora_rank": 32, "n_group": 2, "topk_group": 1},
        **{"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "num_key_value_heads": 4},
    },
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_parameters_are_those_of_the_modules(kind: str) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = AutoConfig.for_model(kind, **sizes, vocab_size=512, **CONFIGS[kind])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    real = {id(p): p.numel() for p in model.parameters() if p.dim() > 1}  # no norms, no biases
    assert Shape.of(config.to_dict()).parameters == sum(real.values())


def test_what_a_token_costs_is_what_its_products_are() -> None:
    model = tiny_model()
    shape = Shape.of(model.config.to_dict())
    linear = [m for m in model.model.layers.modules() if isinstance(m, torch.nn.Linear)]
    assert shape.active == sum(m.weight.numel() for m in linear)
    width = model.model.layers[0].self_attn.q_proj.out_features  # pyright: ignore
    assert shape.pair_flops == 4 * len(model.model.layers) * width


def test_a_shape_without_heads_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(BirlError, match=r"neither a config\.json nor one of"):
        shape_of(str(tmp_path))
    with pytest.raises(BirlError, match="num_attention_heads is missing"):
        Shape.of({"hidden_size": 8})


@st.composite
def cases(draw: st.DrawFn) -> tuple[Shape, str, Layout, Workload]:
    shape = KNOWN[draw(st.sampled_from(["llama3-8b", "qwen3-30b-a3b", "deepseek-v3"]))]
    gpus = draw(st.sampled_from([8, 16, 64]))
    kind = draw(st.sampled_from(sorted(KINDS)))
    layout = draw(st.sampled_from(list(layouts(shape, cluster_of(kind, gpus)))))
    keep = draw(st.sampled_from(["all", "half", "inputs"]))
    return (
        shape,
        kind,
        layout,
        Workload(batch=2**22, microbatch=draw(st.sampled_from([4096, 65536])), sequence=4096, keep=keep),
    )


@settings(max_examples=150, deadline=None)
@given(cases(), st.sampled_from(["flops", "hbm", "inside", "between", "efficiency"]), st.floats(1, 8))
def test_better_hardware_is_never_slower(case: tuple, name: str, times: float) -> None:
    shape, kind, layout, work = case
    cluster = cluster_of(kind, layout.size)
    better = replace(cluster, **{name: getattr(cluster, name) * times})
    assert step(shape, better, layout, work).seconds <= step(shape, cluster, layout, work).seconds * (1 + 1e-9)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_time_is_the_sum_of_its_parts_and_below_the_peak(case: tuple) -> None:
    shape, kind, layout, work = case
    cluster = cluster_of(kind, layout.size)
    found = step(shape, cluster, layout, work)
    parts = found.products + found.elementwise + sum(found.exposed.values()) + found.bubble + found.optimizer
    assert found.seconds == pytest.approx(parts)
    assert 0 < found.mfu < cluster.efficiency
    assert found.tokens * found.seconds * layout.size == pytest.approx(work.batch)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_state_is_split_over_all_but_copies(case: tuple) -> None:
    shape, _, layout, work = case
    found = memory(shape, layout, work)
    state = found["weights, float32"] + found["gradients, float32"] + found["optimizer state"]
    assert state * layout.size == pytest.approx(16 * shape.parameters * layout.ddp)
    less = memory(shape, layout, replace(work, keep="inputs"))["activations"]
    assert less <= memory(shape, layout, replace(work, keep="half"))["activations"] or work.keep == "all"


def test_longer_sequences_and_more_copies_cost_more() -> None:
    shape, cluster = KNOWN["llama3-8b"], cluster_of("h100", 8)
    layout = Layout(fsdp=8)
    long = replace(WORK, sequence=8192)
    assert step(shape, cluster, layout, long).seconds > step(shape, cluster, layout, WORK).seconds
    assert sum(memory(shape, Layout(ddp=8), WORK).values()) > sum(memory(shape, layout, WORK).values())


@pytest.mark.parametrize(("cp", "sequence"), [(1, 131_072), (1, 64), (8, 131_072)])
def test_the_backward_pass_of_attention_is_counted(cp: int, sequence: int) -> None:
    """What `mha_varlen_bwd` of PyTorch's FlashAttention 2 allocates for a rank's tokens, and its result's gradient."""
    shape, tokens = KNOWN["llama3-8b"], 131_072
    count = tokens // sequence * min(cp, 2)  # sequences, each in two pieces under cp
    queries, padded = (tokens // cp, 32, 128), (tokens // cp + 128 * count, 32, 128)
    keys, expanded = (tokens, 8, 128), (tokens, 32, 128)
    halves = sum(2 * prod(size) for size in (queries, queries, keys, keys, expanded, expanded))
    found = attention_workspace(shape, Layout(cp=cp), tokens / cp, tokens / sequence)
    assert found == halves + 4 * prod(padded)
    work = Workload(batch=tokens, microbatch=tokens, sequence=sequence)
    behind = 2 * tokens // cp * (2 * 4096 + 4 * 14_336)  # freed by then
    assert Passes.of(shape, Layout(cp=cp), work).layer >= found - behind


def test_plans_fit_and_the_first_is_the_fastest() -> None:
    cluster = cluster_of("h100", 64)
    plans = best(KNOWN["llama3-70b"], cluster, replace(WORK, sequence=8192), {})
    assert plans and all(plan.bytes <= USABLE * cluster.memory for plan in plans)
    seconds = [plan.step.seconds for plan in plans]
    assert seconds == sorted(seconds)
    assert len({plan.layout for plan in plans}) == len(plans)
    more = best(KNOWN["llama3-70b"], replace(cluster, memory=2 * cluster.memory), replace(WORK, sequence=8192), {})
    assert {plan.layout for plan in plans} <= {plan.layout for plan in more}
    assert more[0].step.seconds <= seconds[0]


def test_moments_in_8_bits_take_a_quarter_and_a_longer_step(capsys: pytest.CaptureFixture[str]) -> None:
    shape, layout, eight = KNOWN["llama3-8b"], Layout(fsdp=8), replace(WORK, optimizer="adamw8bit")
    wide, small = (memory(shape, layout, work) for work in (WORK, eight))
    state = small.pop("optimizer state")
    assert state / wide.pop("optimizer state") == pytest.approx(stored((4096, 4096)) / (8 * 4096**2)) and small == wide
    cluster = cluster_of("h100", 8)
    assert step(shape, cluster, layout, eight).optimizer > step(shape, cluster, layout, WORK).optimizer
    words = ["plan", "--cluster", "llama3-8b", "gpus=8", "fsdp=8", "--json"]
    plans = []
    for kind in ("adamw", "adamw8bit"):
        main([*words, f"optimizer={kind}"])
        plans.append(json.loads(capsys.readouterr().out)["plans"][0]["memory"]["optimizer state"])
    assert plans[1] / plans[0] == pytest.approx(2.03 / 8, rel=1e-3)
    assert main([*words, "optimizer=adamw8bits"]) == 2
    assert "optimizer=adamw8bits: adamw, adamw8bit. Did you mean adamw8bit?" in capsys.readouterr().err


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(BirlError, match=r"Nothing fits: .* GiB a GPU .* 70.8 GiB are usable"):
        best(KNOWN["llama3-405b"], cluster_of("h100", 8), WORK, {})
    with pytest.raises(BirlError, match="batch=4096 is less than one sequence of 8192"):
        best(KNOWN["llama3-8b"], cluster_of("h100", 8), replace(WORK, batch=4096, sequence=8192), {})


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(fsdp=4), "fsdp=4 makes 4 ranks, and there are 8 GPUs"),
        (Layout(tp=8), "tp=8 does not divide 32 query and 4 key heads"),
        (Layout(fsdp=4, tp=2), "tp=2: birl does not split experts over tensor-parallel ranks"),
        (Layout(fsdp=8, ep=3), "ep=3 does not divide 128 experts"),
        (Layout(fsdp=4, tp=2, ep=8), r"ep=8 does not divide fsdp x cp = 4"),
    ],
)
def test_a_layout_that_does_not_divide_is_refused(layout: Layout, message: str) -> None:
    with pytest.raises(BirlError, match=message):
        check(layout, KNOWN["qwen3-30b-a3b"], 8)


def test_rings_that_leave_a_machine_use_all_its_network_cards() -> None:
    cluster = cluster_of("h100", 64)
    assert cluster.bandwidth(8) == 0.8 * cluster.inside
    assert cluster.bandwidth(64) == pytest.approx(0.8 * min(cluster.inside, 8 * cluster.between))
    assert cluster.bandwidth(8, stride=8) == pytest.approx(0.8 * cluster.between)


def test_the_command_plans_a_folder_and_a_name(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--cluster", str(tiny), "gpus=4", "batch=65536", "sequence=1024", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    layout = found["plans"][0]["layout"]
    assert layout["ddp"] * layout["fsdp"] * layout["cp"] * layout["tp"] == 4
    assert main(["plan", "--cluster", "qwen3-30b-a3b", "gpus=16", "ep=8", "gpu=h200"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "30.5 billion parameters, 3.0 of them for a token; 16 x h200" in lines[0]
    assert all("ep=8" in line for line in lines[4:6]) and any("together" in line for line in lines)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["llama3-7b"], "Did you mean"),
        (["gpu=h10"], "gpu=h10: there is no such kind"),
        (["gpu_count=8"], "gpu_count: there is no such key"),
        (["gpus=eight"], "gpus is a number"),
        (["gpus=1.5"], "gpus is a whole number"),
        (["batch=0"], "batch=0: at least 1"),
        (["keep=some"], "keep=some: all, half, inputs"),
        (["tp=3", "gpus=12"], "tp=3 does not divide"),
        (["--loud"], "--loud"),
    ],
)
def test_mistakes_are_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--cluster", *words]) == 2
    assert message in capsys.readouterr().err


def test_every_key_of_the_command_changes_something(capsys: pytest.CaptureFixture[str]) -> None:
    from birl.plan.cluster_command import Question

    base = ["plan", "--cluster", "--json", "model=qwen3-30b-a3b", "gpus=16", "sequence=4096"]

    def printed(*words: str) -> str:
        assert main([*base, *words]) == 0
        return capsys.readouterr().out

    before = printed()
    values = {"model": "llama3-8b", "gpu": "h200", "gpus": 32, "batch": 2**21, "sequence": 2048, "microbatch": 8192}
    values |= {"keep": "inputs", "optimizer": "adamw8bit", "ddp": 2, "fsdp": 8, "cp": 2, "ep": 2, "node": 4}
    values |= {"flops": 5e14, "memory": 60e9, "hbm": 2e12, "inside": 2e11, "between": 2e10, "efficiency": 0.4}
    assert {*values, "tp"} == {f.name for f in fields(Question)}
    assert printed("model=llama3-8b", "tp=2") != printed("model=llama3-8b")  # birl splits no experts over tp
    for key, value in values.items():
        assert printed(f"{key}={value}") != before, key
