"""Weights that are stored in 4 or 8 bits with scales, as gpt-oss and DeepSeek are: what is trained, and written, is a
plain model with the values that transformers reads there."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from birl.errors import BirlError
from birl.models.load import load_model, resolve, skeleton
from birl.models.slices import fill, sketched
from birl.models.stored import quantization, value_of
from tests.models import sweep
from tests.zoo import build

BLOCKS: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIRL_CACHE", str(tmp_path / "cache"))


def stored(folder: Path, kind: str, change: Change, config: dict[str, Any]) -> Path:
    """Scales are in another file than the weights."""
    build(kind, hidden_size=64, intermediate_size=64).save_pretrained(folder)
    tensors = change(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    names = {k: f"model-0000{1 + k.endswith(('_scale_inv', '_scales'))}-of-00002.safetensors" for k in tensors}
    for file in set(names.values()):
        save_file({k: t for k, t in tensors.items() if names[k] == file}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    whole = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


def blocks(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    result = dict(tensors)
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        scales = torch.rand(tensors[name].shape[0] // 32, tensors[name].shape[1] // 32) + 0.5
        result |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}
    return result


def scalars(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    result = dict(tensors)
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        codes, scale = tensors[name].to(torch.float8_e4m3fn), torch.tensor(1.7)
        result |= {name: codes, f"{name}_scale_inv": scale, name.replace("weight", "activation_scale"): scale + 1}
    return result


def fours(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    result = dict(tensors)
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inner, outer = result.pop(name).shape
        codes = torch.randint(0, 256, (experts, outer, inner // 32, 16), dtype=torch.uint8)
        scales = torch.randint(122, 126, (experts, outer, inner // 32), dtype=torch.uint8)
        result |= {f"{name}_blocks": codes, f"{name}_scales": scales}
    return result


@pytest.mark.parametrize(
    ("kind", "change", "config"),
    [
        ("qwen3", blocks, BLOCKS),
        ("qwen3", scalars, {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}),
        ("gpt_oss", fours, {"quant_method": "mxfp4"}),
    ],
    ids=["blocks", "scalars", "mxfp4"],
)
def test_they_are_what_transformers_reads(kind: str, change: Change, config: dict[str, Any], tmp_path: Path) -> None:
    folder = stored(tmp_path / "tiny", kind, change, config)
    told = list[str]()
    plain = resolve(str(folder), told.append)
    assert len(told) == 1 and resolve(str(folder), told.append) == plain and len(told) == 1
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    model, parts = load_model(plain), sketched(plain, torch.device("cpu"))
    fill(parts)
    for own in (model, parts):
        assert own.state_dict().keys() == theirs.keys()
        assert all(torch.equal(t.bfloat16(), theirs[n].bfloat16()) for n, t in own.state_dict().items())
    assert not sweep.exported(model)
    shapes = [{n: p.shape for n, p in m.named_parameters()} for m in (skeleton(folder), model)]
    assert shapes[0] == shapes[1]


def test_blocks_may_be_cut_at_the_edge() -> None:
    """DeepSeek's kv_a_proj has 576 rows, four blocks and a half."""
    codes, scales = torch.ones(80, 40).to(torch.float8_e4m3fn), torch.arange(6.0).view(3, 2)
    tensors = {"x.weight": codes, "x.weight_scale_inv": scales}
    name, value = value_of("x.weight", tensors.get, BLOCKS)
    assert name == "x.weight" and value.dtype == torch.bfloat16
    assert value[::32, ::32].tolist() == scales.tolist() and value.shape == codes.shape


@pytest.mark.parametrize(
    ("change", "config", "words"),
    [
        (dict, {"quant_method": "awq"}, "quantised by awq .* birl does not read; it reads fp8 and mxfp4"),
        (
            lambda t: blocks(t) | {"model.layers.1.mlp.up_proj.weight_scale_inv": torch.ones(3, 3)},
            BLOCKS,
            "another shape",
        ),
        (
            lambda t: {n: x for n, x in blocks(t).items() if "1.mlp.up_proj.weight_" not in n},
            BLOCKS,
            "scales of .* missing",
        ),
    ],
    ids=["awq", "shape", "missing"],
)
def test_what_does_not_fit_is_refused(change: Change, config: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = stored(tmp_path / "tiny", "qwen3", change, config)
    with pytest.raises(BirlError, match=words):
        resolve(str(folder), lambda text: None)
    assert not list((tmp_path / "cache").glob("models/*"))


def test_a_models_text_may_say_how_it_is_stored() -> None:
    config: dict[str, Any] = {"text_config": {"quantization_config": BLOCKS, "hidden_size": 8}}
    assert quantization(config) == BLOCKS and config == {"text_config": {"hidden_size": 8}}
