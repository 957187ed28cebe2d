"""A model of which every rank reads its own slices is the one that is loaded whole, and no rank ever has all of it."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    OlmoHybridConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from birl.errors import BirlError
from birl.learner.learner import Learner
from birl.learner.lora import digest
from birl.models.load import load_model
from birl.models.slices import fill, sketched
from birl.models.verify import prove
from birl.parallel.ranks import Grid, Ranks
from tests.parallel.processes import on_ranks
from tests.tiny import tiny_model_folder

CPU = torch.device("cpu")
SMALL: Any = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None,
}  # fmt: skip
MLA: Any = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
CONFIGS = {
    "llama, tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama, untied": LlamaConfig(**SMALL, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    "qwen3 moe": Qwen3MoeConfig(
        **SMALL,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        head_dim=16,  # pyright: ignore
        decoder_sparse_step=1,
    ),  # pyright: ignore
    "olmo hybrid": OlmoHybridConfig(**SMALL, layer_types=["linear_attention", "full_attention", "linear_attention"]),
}


def folder_of(name: str, root: Path, dtype: torch.dtype = torch.float32, size: str = "5GB") -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[name], dtype=dtype).save_pretrained(root / name, max_shard_size=size)
    return root / name


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Everything by every name, buffers that are not saved too."""
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in tensors.items()}


def in_parts(ranks: Ranks, folders: list[Path], trainable: bool) -> list[dict[str, torch.Tensor]]:
    return [one_in_parts(ranks, folder, trainable) for folder in folders]


def one_in_parts(ranks: Ranks, folder: Path, trainable: bool) -> dict[str, torch.Tensor]:
    model = sketched(folder, CPU)
    assert all(p.is_meta for p in model.parameters())
    learner = Learner(model, ranks=ranks, dtype=torch.bfloat16, trainable=trainable)
    if trainable:  # what the optimizer steps is what the model computes with
        for name, parameter in learner.model.named_parameters():
            assert isinstance(parameter, DTensor)
            assert learner.masters.tensors[name].data_ptr() == parameter.to_local().data_ptr(), name
    return values(model)


DENSE = ("llama, tied", "llama, untied", "qwen3")


@pytest.mark.parametrize(("grid", "names"), [(Grid(fsdp=3), tuple(CONFIGS)), (Grid(fsdp=2, tp=2), DENSE)])
def test_parts_make_the_whole_model(grid: Grid, names: tuple[str, ...], tmp_path: Path) -> None:
    folders = [folder_of(name, tmp_path, size="40KB") for name in names]  # several files
    for *found, folder in zip(*on_ranks(grid, in_parts, folders, True), folders, strict=True):
        whole = load_model(folder)
        begun, buffers = dict(values(whole)), dict(whole.named_buffers())
        for one in found:
            assert one.keys() == begun.keys(), folder
            for name, value in begun.items():  # a master is one of the numbers that round to the parameter
                kind = value.dtype if name in buffers else torch.bfloat16
                assert torch.equal(one[name].to(kind), value.to(kind)), (folder, name)


@pytest.mark.parametrize("name", CONFIGS)
def test_one_process_fills_the_whole_model(name: str, tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path, size="40KB")
    expected = values(load_model(folder))
    alone: Any = sketched(folder, CPU)
    assert fill(alone) and not fill(alone)
    assert all(torch.equal(t, expected[n]) for n, t in values(alone).items())
    tied = alone.get_output_embeddings().weight is alone.get_input_embeddings().weight
    assert tied == alone.config.tie_word_embeddings


@pytest.mark.parametrize("name", CONFIGS)
def test_its_digest_is_that_of_the_whole_model(name: str, tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path)
    assert digest(sketched(folder, CPU)) == digest(load_model(folder))


def test_a_frozen_one_is_rounded_as_it_is_read(tmp_path: Path) -> None:
    folder = folder_of("llama, untied", tmp_path)
    expected = load_model(folder)
    for found in on_ranks(Grid(fsdp=2), one_in_parts, folder, False):
        assert all(torch.equal(found[n], p.bfloat16()) for n, p in expected.named_parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "missing model.norm.weight"),
        (lambda t: t.update({"model.extra": torch.zeros(2)}), "unexpected model.extra"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(5)}), r"mismatched model.norm.weight \(\(5,\) instead"),
        (lambda t: t.update({"score.weight": torch.zeros(1, 64)}), "is a reward model"),
    ],
)
def test_what_load_model_refuses_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for load in (load_model, lambda folder: sketched(folder, CPU)):
        with pytest.raises(BirlError, match=message):
            load(folder)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    """Where a published model has them, transformers knows their number; here it is another model's."""
    model = AutoModelForCausalLM.from_config(DeepseekV3Config(**SMALL, **MLA))
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    further = {f"model.layers.3.{name}.weight": torch.zeros(32, 4) for name in ("eh_proj", "self_attn.o_proj")}
    save_file(tensors | further, file, metadata={"format": "pt"})
    for load in (load_model, lambda folder: sketched(folder, CPU)):
        load(tmp_path)
    save_file(tensors | {"model.layers.4.eh_proj.weight": torch.zeros(2)}, file, metadata={"format": "pt"})
    for load in (load_model, lambda folder: sketched(folder, CPU)):
        with pytest.raises(BirlError, match=r"unexpected model\.layers\.4\.eh_proj"):
            load(tmp_path)


def test_an_architecture_is_verified_without_its_weights(tmp_path: Path) -> None:
    for name in ("llama, tied", "qwen3", "mixtral", "qwen3 moe"):
        prove(AutoConfig.from_pretrained(folder_of(name, tmp_path)), CPU)
    folder = folder_of("llama, tied", tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"layer_types": ["reference_sliding_attention"] * 3}))
    with pytest.raises(BirlError, match="reference_sliding_attention"):
        prove(AutoConfig.from_pretrained(folder), CPU)


def memory(line: str) -> int:
    """Of this process [bytes]: VmHWM, the largest resident set so far; RssAnon, what is no page of a file."""
    found = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(line))
    return int(found.split()[1]) * 1024


def taken(ranks: Ranks, folder: Path, parts: bool) -> tuple[int, int]:
    """Bytes at the peak, pages of the file among them, and in the end without those."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    peak, anonymous = memory("VmHWM"), memory("RssAnon")
    model = sketched(folder, CPU) if parts else load_model(folder)
    learner = Learner(model, ranks=ranks, dtype=torch.float32, trainable=False)
    assert not any(p.is_meta for p in learner.model.parameters())
    return memory("VmHWM") - peak, memory("RssAnon") - anonymous


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_no_rank_ever_has_the_whole_model(tmp_path: Path) -> None:
    config = LlamaConfig(**SMALL | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4})
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path)  # as most models are published
    size = 2 * sum(f.stat().st_size for f in tmp_path.glob("*.safetensors"))  # in float32
    assert size > 150e6
    parts, wholes = (on_ranks(Grid(fsdp=n), taken, tmp_path, parts) for n, parts in ((4, True), (2, False)))
    shares = [[round(n / size, 2) for n in one] for one in (*parts, *wholes)]
    assert max(peak for peak, _ in parts) < 0.75 * size < size < min(peak for peak, _ in wholes), shares
    assert max(left for _, left in parts) < 0.35 * size, shares
