"""A checkpoint as a model folder in files of a given size: transformers reads it, and says the same."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from birl.cli import checkpoints, main
from birl.errors import BirlError
from birl.learner import checkpoint
from birl.learner.export import export, export_adapter, resolved
from birl.learner.learner import Learner
from birl.learner.lora import Lora
from birl.learner.low_rank_run import SharedBase
from birl.models.load import load_model, save_hf_config
from birl.models.target_logprobs import TargetRow
from birl.parallel.ranks import Grid, Ranks
from birl.server.tinker.checkpoints import peft as peft_files
from tests.full_disk import full_disk
from tests.learner.test_low_rank import moved
from tests.parallel.processes import on_ranks
from tests.tiny import tiny_model_folder, tiny_tokenizer
from tests.zoo import build

MOE = Qwen3MoeConfig(
    vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=24, max_position_embeddings=64,
)  # fmt: skip


def folder_of(kind: str, root: Path) -> Path:
    if kind == "llama":
        return tiny_model_folder(root)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(MOE).save_pretrained(root)
    tiny_tokenizer().save_pretrained(root)
    return root


def wrote(ranks: Ranks, folder: Path, run: Path) -> None:
    learner = Learner(load_model(folder), ranks=ranks, dtype=torch.float32)
    checkpoint.save(run / "checkpoints", 1, learner.tensors(), {}, ranks)
    (run / "config.json").write_text('{"model.dtype": "float32"}')


def a_run(root: Path) -> tuple[Path, Path]:
    """A run with one checkpoint, and that."""
    folder, run = tiny_model_folder(root / "base"), root / "run"
    wrote(Ranks(), folder, run)
    save_hf_config(load_model(folder), tiny_tokenizer(), run / "model")
    return run, run / "checkpoints" / "step-000001"


@pytest.mark.parametrize("kind", ["llama", "qwen3 moe"])
def test_a_sharded_checkpoint_is_exported_in_shards(kind: str, tmp_path: Path) -> None:
    folder, run, target = folder_of(kind, tmp_path / "model"), tmp_path / "run", tmp_path / "exported"
    on_ranks(Grid(fsdp=2), wrote, folder, run)
    model = load_model(folder)
    save_hf_config(model, tiny_tokenizer(), run / "model")
    limit = 60_000
    export(run / "checkpoints" / "step-000001", run, target, torch.float32, limit / 1e9)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    files = sorted(target.glob("*.safetensors"))
    assert len(files) > 2 and set(index["weight_map"].values()) == {f.name for f in files}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            size = sum(opened.get_tensor(name).nbytes for name in opened.keys())  # noqa: SIM118
            assert size <= limit or len(opened.keys()) == 1
    ids = torch.arange(3, 40)[None]
    found = AutoModelForCausalLM.from_pretrained(target)
    assert found.dtype == torch.float32
    expected = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(found(ids).logits, expected(ids).logits, atol=1e-6, rtol=1e-6)
    assert all(torch.equal(p, dict(expected.named_parameters())[n]) for n, p in found.named_parameters())


def test_the_size_of_shards_is_a_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, run = tiny_model_folder(tmp_path / "model"), tmp_path / "run"
    wrote(Ranks(), folder, run)
    save_hf_config(load_model(folder), tiny_tokenizer(), run / "model")
    assert checkpoints.run([str(run), "export", "last", str(tmp_path / "one")]) == 0
    assert [f.name for f in (tmp_path / "one").glob("*.safetensors")] == ["model.safetensors"]
    assert checkpoints.run([str(run), "export", "last", str(tmp_path / "many"), "--shard-gb", "0.0001"]) == 0
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    for word in ("0", "-1", "much"):
        with pytest.raises(BirlError, match="--shard-gb"):
            checkpoints.run([str(run), "export", "last", str(tmp_path / "bad"), "--shard-gb", word])


@pytest.mark.parametrize("name", ["out", "out.gguf"])
def test_a_full_disk_leaves_nothing_that_looks_complete(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error of safetensors is no OSError, and was a traceback."""
    if name.endswith("gguf"):
        pytest.importorskip("gguf")
    run, _ = a_run(tmp_path)
    with full_disk(20_000):  # beyond the tokenizer
        assert main(["checkpoints", str(run), "export", "last", str(tmp_path / "new" / name)]) == 2
    assert "cannot be written: Error while serializing: I/O error: File too large" in capsys.readouterr().err
    assert not list((tmp_path / "new").iterdir())


@pytest.mark.parametrize("there", ["kept", "replaced"])
def test_a_model_that_is_replaced_is_whole_at_any_moment(
    tmp_path: Path, there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that chat, serve and eval had exported before, and that of `save_model`: a kill while the old one was deleted
    left a part of it, which was taken for the whole, and `save_model` deleted it before a failure."""
    run, step = a_run(tmp_path)
    goal = resolved(str(run)) if there == "kept" else run / "exported"
    if there == "replaced":
        export(step, run, goal)
        with full_disk(20_000), pytest.raises(BirlError, match="exported cannot be written: "):
            export(step, run, goal, there=there)
    files = sorted(f.name for f in goal.iterdir())
    os.utime(goal, (1, 1))

    def killed(path: Path, **_: Any) -> None:
        next(path.glob("*.safetensors")).unlink()
        raise SystemExit("killed")

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(shutil, "rmtree", killed)
        (resolved(str(run)) if there == "kept" else export(step, run, goal, there=there))
    assert not goal.exists()
    (resolved(str(run)) if there == "kept" else export(step, run, goal, there=there))
    assert sorted(f.name for f in goal.iterdir()) == files


@pytest.mark.parametrize("content", [None, b"", b'{"model.dtype": "flo', b"[]", b"\xff\xfe"])
def test_without_its_configuration_a_run_is_not_exported(tmp_path: Path, content: bytes | None) -> None:
    """Its type was taken for bfloat16."""
    run, step = a_run(tmp_path)
    (run / "config.json").unlink() if content is None else (run / "config.json").write_bytes(content)
    with pytest.raises(BirlError, match=r"run/config.json, the configuration of the run, cannot be read: "):
        export(step, run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_folders_of_other_programs_beside_an_export_stay(tmp_path: Path) -> None:
    run, step = a_run(tmp_path)
    mine, left = tmp_path / "out.part-1", tmp_path / "out.part-0123abcd"
    for folder in (mine, left):
        folder.mkdir()
        os.utime(folder, (1, 1))
    export(step, run, tmp_path / "out")
    assert mine.exists() and not left.exists()


def test_an_export_tells_what_it_passes_over_and_what_is_broken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A newer checkpoint whose state cannot be read, and a tokenizer that is cut, which nobody could load."""
    folder, run = tiny_model_folder(tmp_path / "model"), tmp_path / "run"
    wrote(Ranks(), folder, run)
    save_hf_config(load_model(folder), tiny_tokenizer(), run / "model")
    shutil.copytree(run / "checkpoints" / "step-000001", run / "checkpoints" / "step-000002")
    (run / "checkpoints" / "step-000002" / "state.json").write_text('{"step')
    assert checkpoints.run([str(run), "export", "last", str(tmp_path / "one")]) == 0
    assert "passed over, as state.json cannot be read: 2\n" in capsys.readouterr().err
    text = (run / "model" / "tokenizer.json").read_text()
    (run / "model" / "tokenizer.json").write_text(text[: len(text) // 2])
    with pytest.raises(BirlError, match=r"run/model: the tokenizer cannot be loaded"):
        checkpoints.run([str(run), "export", "last", str(tmp_path / "two")])
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize("kind", ["mixtral", "glm4_moe", "gpt_oss", "hrm_text"])
def test_shards_have_what_transformers_saves(kind: str, tmp_path: Path) -> None:
    """Pieces of what files hold together share a file, and a router's buffer stays float32."""
    model = build(kind)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.fill_(1 + 2**-12)
    save_hf_config(model, tiny_tokenizer(), tmp_path / "run" / "model")
    checkpoint.save(tmp_path / "run" / "checkpoints", 1, Learner(model, dtype=torch.float32).tensors(), {}, Ranks())
    step, target = tmp_path / "run" / "checkpoints" / "step-000001", tmp_path / "exported"
    export(step, tmp_path / "run", target, torch.bfloat16, 2e-5)
    files = sorted(target.glob("*.safetensors"))
    assert len(files) > 2
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    for p in model.parameters():
        p.data = p.data.bfloat16()
    model.save_pretrained(tmp_path / "saved")
    wanted = load_file(tmp_path / "saved" / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_what_a_folder_says_is_said_again(tmp_path: Path) -> None:
    """Keys of earlier versions, which other programs read (rope_theta was left out: they took 10,000), and keys that
    nobody knows."""
    folder, run = tiny_model_folder(tmp_path / "model"), tmp_path / "run"
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"], config["dtype"]
    scaling = {"type": "linear", "factor": 2.0}
    config |= {"rope_theta": 5e4, "rope_scaling": scaling, "torch_dtype": "float16", "own": {"key": [1]}}
    asked = {"temperature": 0.6, "eos_token_id": [2, 5], "do_sample": False, "own": 1}
    (folder / "generation_config.json").write_text(json.dumps(asked))
    (folder / "config.json").write_text(json.dumps(config))
    save_hf_config(load_model(folder), tiny_tokenizer(), run / "model", folder)
    wrote(Ranks(), folder, run)
    export(run / "checkpoints" / "step-000001", run, tmp_path / "out", torch.bfloat16)
    again = json.loads((tmp_path / "out" / "config.json").read_text())
    assert again | config == again | {"torch_dtype": "float16"}
    assert again["torch_dtype"] == again["dtype"] == "bfloat16"
    assert asked.items() <= json.loads((tmp_path / "out" / "generation_config.json").read_text()).items()
    models: list[Any] = [load_model(f) for f in (folder, tmp_path / "out")]
    one, two = (model.config.rope_parameters for model in models)
    assert one == two and one["rope_theta"] == 5e4


@pytest.mark.parametrize("kind", ["glm4_moe", "laguna", "longcat_flash", "jamba"])
def test_peft_reads_matrices_beside_experts(kind: str, tmp_path: Path) -> None:
    """It took those of a shared expert and of dense layers for parts of experts, and left them out; those of Laguna it
    renamed, and those of Jamba's time steps have no effect in it."""
    base, run, ids = tmp_path / "base", tmp_path / "run", torch.arange(3, 40)[None]
    build(kind).save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    learner = Learner(load_model(base), dtype=torch.float32, lora=Lora(rank=2, alpha=4.0))
    for tensor in learner.masters.tensors.values():
        tensor.data.normal_(0.0, 0.3)
    learner.loaded(1)
    save_hf_config(learner.model, tiny_tokenizer(), run / "model", base)
    (run / "config.json").write_text(json.dumps({"model.path": str(base), "model.dtype": "float32"}))
    checkpoint.save(run / "checkpoints", 1, learner.tensors(), {}, Ranks())
    export_adapter(run / "checkpoints" / "step-000001", run, tmp_path / "adapter")
    with torch.no_grad():
        plain = load_model(base)(ids, use_cache=False).logits
        theirs = peft.PeftModel.from_pretrained(load_model(base), str(tmp_path / "adapter"))  # type: ignore[arg-type]
        adapted = theirs(ids, use_cache=False).logits
        torch.testing.assert_close(adapted, learner.model(ids, use_cache=False).logits, atol=1e-3, rtol=1e-3)
    assert (adapted - plain).abs().max() > 0.1


@pytest.mark.parametrize("kind", ["glm4_moe", "laguna"])
def test_peft_reads_what_the_service_exports(kind: str, tmp_path: Path) -> None:
    build(kind).save_pretrained(tmp_path / "base")
    shared, ids = SharedBase(build(kind), torch.float32), torch.arange(3, 40)
    run = moved(shared, 1, unembed=False)
    tensors, config = peft_files(run, str(tmp_path / "base"), shared.model)
    (tmp_path / "adapter").mkdir()
    save_file(tensors, tmp_path / "adapter/adapter_model.safetensors")
    (tmp_path / "adapter/adapter_config.json").write_bytes(config)
    ((own,),) = shared.learn([(run.weights, [TargetRow(ids, ids[:, None])])], None)
    with torch.no_grad():
        theirs = peft.PeftModel.from_pretrained(load_model(tmp_path / "base"), str(tmp_path / "adapter"))  # type: ignore[arg-type]
        logp = theirs(ids[None], use_cache=False).logits[0].log_softmax(-1).gather(1, ids[:, None])
    torch.testing.assert_close(logp, own, atol=1e-4, rtol=1e-4)
