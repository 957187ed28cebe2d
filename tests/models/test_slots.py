"""What the cache keeps comes from what attention hands over; kernels refuse indexes that lead out of their memory."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from birl import kernels
from birl.errors import BirlError
from birl.kernels.tensors import PAGE
from birl.models import attention, twin
from birl.models.attention import Packed
from birl.models.forward import hidden_states
from birl.models.heads import head
from birl.models.load import skeleton
from birl.models.paged import Cache, Paged, Slot
from birl.models.slots import page_bytes, slots_of
from birl.models.verify import verify

BASE = {
    **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"max_position_embeddings": 256, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1},
    "eos_token_id": 2,
}
MLA = {
    **{"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "n_routed_experts": 4},
    **{"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32},
    **{"first_k_dense_replace": 1, "num_key_value_heads": 4},
}
# architecture, its options, what each call of attention keeps: (layer, query heads, key heads, key,
# value)
MODELS: dict[str, tuple[str, dict[str, Any], list[tuple[int, ...]]]] = {
    "keys as wide as values": ("deepseek_v3", MLA | {"v_head_dim": 64}, [(i, 4, 4, 64, 64) for i in range(2)]),
    "wider keys than values": ("deepseek_v3", MLA | {"v_head_dim": 16}, [(i, 4, 4, 64, 16) for i in range(2)]),
    "an ignored number of key heads": ("gpt_neox", {"num_key_value_heads": 2}, [(i, 4, 4, 16, 16) for i in range(2)]),
    "two calls in a layer": ("diffllama", {"num_key_value_heads": 2}, [(i // 2, 4, 2, 16, 16) for i in range(4)]),
}


def build(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**BASE, **options})
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME).eval()


@torch.no_grad()
def decoded(model: Any, ids: Tensor, first: int = 37) -> Tensor:
    """Log-probs [T, V] of one sequence over the cache: `first` tokens at once, then one after another."""
    cache = Cache.make(8, slots_of(model), head(model).weight.dtype, torch.device("cpu"))
    table, rows = [[5, 2, 7, 1]], []
    for begin, end in [(0, first), *((i, i + 1) for i in range(first, len(ids)))]:
        places = torch.arange(begin, end)
        layout = Paged.of(cache, table * (end - begin), [i + 1 for i in range(begin, end)], [end - begin], [0])
        rows.append(head(model)(hidden_states(model, ids[begin:end], places, layout)))
    return torch.cat(rows).log_softmax(-1)


@torch.no_grad()
def own(model: Any, ids: Tensor) -> Tensor:
    """The same by transformers' own attention."""
    model.set_attn_implementation("eager")
    try:
        return model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
    finally:
        model.set_attn_implementation(attention.NAME)


@pytest.mark.parametrize("name", MODELS)
def test_the_cache_has_the_shape_of_what_attention_hands_over(name: str) -> None:
    kind, options, slots = MODELS[name]
    model = build(kind, **options)
    assert slots_of(model) == tuple(Slot(*each) for each in slots)
    assert page_bytes(model) == PAGE * 4 * sum(heads * (key + value) for _, _, heads, key, value in slots)
    ids = torch.randint(0, 64, (45,), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(decoded(model, ids), own(model, ids), atol=2e-4, rtol=0)


def test_attention_without_kernels_finds_zeros_where_nothing_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside caps and sinks, too: a NaN in memory that is new spoilt every token, though it may not be looked at."""
    monkeypatch.setattr(torch, "empty", lambda *shape, **kinds: torch.full(shape, float("nan"), **kinds))
    for extras in (("cap",), ("sinks",), ("chunk",)):
        cache = Cache.make(4, [Slot(0, 4, 4, 32, 32, extras)], torch.float32, torch.device("cpu"))
        assert not any(t.isnan().any() for t in (*cache.keys, *cache.values))


def test_a_model_without_weights_has_the_same_slots(tmp_path: Any) -> None:
    model = build("gpt_neox", num_key_value_heads=2)
    model.save_pretrained(tmp_path)
    assert slots_of(skeleton(tmp_path)) == slots_of(model)


def test_other_keys_than_the_cache_was_made_for_are_refused() -> None:
    model = build("deepseek_v3", **MLA, v_head_dim=64)
    cache = Cache.make(4, [Slot(i, 4, 4, 32, 32) for i in range(2)], torch.float32, torch.device("cpu"))
    layout = Paged.of(cache, [[0]], [1], [1], [0])
    with torch.no_grad(), pytest.raises(BirlError, match=r"\(4, 64, 64\) instead of \(4, 32, 32\)"):
        hidden_states(model, torch.tensor([3]), torch.tensor([0]), layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "change",
    [
        {"table": [[4, 0]]},
        {"table": [[-1, 0]]},
        {"lengths": [65]},
        {"lengths": [0]},
        {"shared": [3]},
        {"shared": [-1]},
        {"starts": [0, 2]},
        {"starts": [1, 1]},
        {"pages": [4]},
        {"pages": [-1]},
        {"places": [32]},
        {"places": [-1]},
        {"heads": 3},
        {"size": 32},
    ],
    ids=str,
)
def test_kernels_do_not_leave_the_cache(dtype: torch.dtype, change: dict[str, Any]) -> None:
    k = kernels.load(dtype, 64)
    if k is None:
        pytest.skip("no kernels here")
    given = {"table": [[1, 3]], "lengths": [40], "starts": [0, 1], "shared": [0], "pages": [3], "places": [7]}
    given |= {"heads": 2, "size": 64} | change
    cache = Cache.make(4, [Slot(0, 4, 2, 64, 64)], dtype, torch.device("cpu"))
    keys, values = cache.keys[0].zero_(), cache.values[0].zero_()
    row = torch.ones(1, given["heads"], given["size"], dtype=dtype)
    n = {name: torch.tensor(given[name], dtype=torch.int32) for name in ("table", "lengths", "starts", "shared")}
    where = [torch.tensor(given[name], dtype=torch.int32) for name in ("pages", "places")]
    with pytest.raises(BirlError, match="A kernel"):
        k.cache_write(row, row, keys, values, *where)
        query = torch.ones(1, 4 if given["heads"] == 2 else 3, given["size"], dtype=dtype)
        k.paged_attention(query, keys, values, *n.values(), 1.0)  # pyright: ignore
    k.cache_write(torch.ones(1, 2, 64, dtype=dtype), torch.ones(1, 2, 64, dtype=dtype), keys, values,
                  torch.tensor([3], dtype=torch.int32), torch.tensor([7], dtype=torch.int32))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("segment", [[0, 9, 0, 0, 0], [-1, 3, 0, 0, 0], [4, 4, 5, 4, 0], [0, 8, 0, 0, 1]], ids=str)
def test_kernels_do_not_leave_the_packed_rows(dtype: torch.dtype, segment: list[int]) -> None:
    k = kernels.load(dtype, 64)
    if k is None:
        pytest.skip("no kernels here")
    rows = torch.ones(8, 2, 64, dtype=dtype)
    with pytest.raises(BirlError, match="A kernel was given a wrong index"):
        k.tree_attention(rows, rows, rows, torch.tensor([segment]), 1.0)


@pytest.mark.parametrize("target", [-1, 48])
def test_a_target_beyond_the_vocabulary_is_refused(target: int) -> None:
    k = kernels.load(torch.float32, 64)
    if k is None:
        pytest.skip("no kernels here")
    with pytest.raises(BirlError, match="no token of the vocabulary"):
        k.logprobs(torch.zeros(2, 48), torch.tensor([3, target]), 1.0)


SLIDING = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS |= {"shared_expert_intermediate_size": 32}
RIGHT = {
    "qwen2_moe": SLIDING | EXPERTS | {"layer_types": ["full_attention", "sliding_attention"]},
    "diffllama": {"num_key_value_heads": 2},
    "hrm_text": {"head_dim": 16, "num_layers_per_stack": 2, "H_cycles": 2, "L_cycles": 2},
    "gemma3_text": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16, "num_hidden_layers": 6},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 4096},
    "qwen3_moe": {"num_key_value_heads": 2, "head_dim": 16} | EXPERTS,
    "deepseek_v3": MLA | {"v_head_dim": 64},
}


@pytest.mark.parametrize("kind", RIGHT)
def test_what_is_accepted_is_right(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Windows in the mask alone, layers that call attention twice or run several times: over the cache, too."""
    monkeypatch.setattr(twin, "cache_folder", lambda name: tmp_path)
    model = build(kind, **RIGHT[kind])
    verify(model)
    ids = torch.randint(0, 64, (45,), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(decoded(model, ids), own(model, ids), atol=1e-3, rtol=0)
    assert list(tmp_path.iterdir())


def test_a_proof_is_of_one_version_configuration_and_type(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(twin, "cache_folder", lambda name: tmp_path)
    cpu, model = torch.device("cpu"), build("mistral", num_key_value_heads=2)
    proofs = {twin.proved(model, cpu)}
    assert twin.proved(build("mistral", num_key_value_heads=2), cpu) in proofs
    proofs.add(twin.proved(model, cpu, torch.bfloat16))
    proofs.add(twin.proved(build("mistral", num_key_value_heads=2, sliding_window=8), cpu))
    for package in ("transformers", "torch"):
        with monkeypatch.context() as other:
            other.setattr(f"{package}.__version__", "0.0")
            proofs.add(twin.proved(model, cpu))
    assert len(proofs) == 5


def test_a_window_that_attention_is_not_told_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The reference has transformers' own masks: had it birl's attention, both would be wrong alike."""
    monkeypatch.setattr(twin, "cache_folder", lambda name: tmp_path)
    model = build("mistral", num_key_value_heads=2, sliding_window=4096)
    attend = Packed.areas
    monkeypatch.setattr(Packed, "areas", lambda self, window: attend(self, None))
    with pytest.raises(BirlError, match="MistralForCausalLM gives other log-probs packed than alone"):
        verify(model)
    assert not list(tmp_path.iterdir())


def test_weights_that_are_no_numbers_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(twin, "cache_folder", lambda name: tmp_path)
    model = build("mistral", num_key_value_heads=2)
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(BirlError, match=r"computes NaN: its weights hold NaN or infinity: model\.norm\.weight"):
        verify(model)
    with torch.device("meta"), pytest.raises(BirlError, match="has no layer with attention"):
        slots_of(build("llama", num_hidden_layers=0))


def test_a_cache_that_calls_overwrite_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(twin, "cache_folder", lambda name: tmp_path)
    model = build("diffllama", num_key_value_heads=2)
    monkeypatch.setattr("birl.models.verify.slots_of", lambda model: list(slots_of(model)[::2]))
    with pytest.raises(BirlError, match="gives other log-probs over the cache than alone"):
        verify(model)


@pytest.mark.parametrize("kind", ["mpt", "bloom"])
def test_layers_that_do_not_call_attention_are_refused_by_name(kind: str) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=64, hidden_size=64, d_model=64, n_layers=2, n_heads=4, n_layer=2)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(BirlError, match=type(model).__name__):
        verify(model)
