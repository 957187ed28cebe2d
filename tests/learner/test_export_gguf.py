"""Model folders as .gguf files: read again by transformers and by llama.cpp itself."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from birl.cli import main
from birl.errors import BirlError
from birl.learner.export_gguf import FORMS, to_gguf
from birl.models.load import load_model, load_tokenizer, resolve
from tests.tiny import tiny_tokenizer
from tests.zoo import build

PYTHON = Path(__file__).parents[2] / ".venv-agents" / "bin" / "python"
LLAMA_CPP = """
import json, sys
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup = sys.argv[1], 256, 1, False
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(params)
asked = {"prompt": json.loads(sys.argv[2]), "max_tokens": 24, "temperature": 0, "cache_prompt": False, "logprobs": 20}
answer = server.handle_completions(asked)["choices"][0]
first = answer["logprobs"]["content"][0]["top_logprobs"]
print(json.dumps([answer["text"], [[t["id"], t["logprob"]] for t in first]]))
"""
THETA = {"rope_type": "default", "rope_theta": 1e5}
TEXTS = ("What is 12 + 345?", "<|im_start|>user\nHi  there<|im_end|>\n", "né\t\U0001f600")


def asked_of_llama_cpp(file: Path, prompt: Any) -> tuple[str, list[tuple[int, float]]]:
    """Its greedy answer, and log-probs of the likeliest first tokens, by id."""
    if not PYTHON.exists():
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no llama.cpp: make setup-agents")
    done = subprocess.run([PYTHON, "-c", LLAMA_CPP, file, json.dumps(prompt)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def saved(kind: str, folder: Path, **options: Any) -> Path:
    size = {"head_dim": 128} if kind == "qwen3" else {}  # transformers reads no other
    size |= {"mistral": {"sliding_window": None}, "starcoder2": {"rope_parameters": THETA}}.get(kind, {})
    model = build(kind, vocab_size=320, **size | options)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "phi3", "starcoder2"])
def test_what_is_read_again_is_the_model(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIRL_CACHE", str(tmp_path / "cache"))
    folder = saved(kind, tmp_path / "model")
    model, ids = load_model(folder), torch.arange(3, 90)[None]
    own = model.state_dict()
    for form, limit in {"f32": 0.0, "f16": 2.0**-11, "bf16": 2.0**-8, "q8_0": 2.0**-7}.items():
        to_gguf(folder, tmp_path / f"{form}.gguf", form)
        again = resolve(str(tmp_path / f"{form}.gguf"))
        theirs = load_model(again).state_dict()
        if form == "f32":
            assert torch.allclose(load_model(again)(ids).logits, model(ids).logits, atol=1e-5)
        assert theirs.keys() == own.keys()
        for name, tensor in own.items():
            bound = tensor.abs() if form != "q8_0" else tensor.abs().max()  # a block of 32 has one scale
            assert ((theirs[name] - tensor).abs() <= limit * bound + 1e-7 * (limit > 0)).all(), (form, name)
        words, their_words = load_tokenizer(folder), load_tokenizer(again)
        assert all(words(text).input_ids == their_words(text).input_ids for text in TEXTS)
        assert their_words.chat_template == words.chat_template
    assert not [*tmp_path.glob(".*part*")]


@pytest.mark.parametrize("high", [4.0, 5.0])
def test_the_scaled_rotary_embedding_of_llama_3_comes_back(
    high: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its factors are a tensor, which transformers passes over: such a file was read as another model."""
    monkeypatch.setenv("BIRL_CACHE", str(tmp_path / "cache"))
    folder, ids = saved("llama", tmp_path / "model"), torch.arange(3, 90)[None]
    plain = load_model(folder)(ids).logits
    config = json.loads((folder / "config.json").read_text())
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": high}
    config["rope_parameters"] |= rope | {"original_max_position_embeddings": 16}
    (folder / "config.json").write_text(json.dumps(config))
    to_gguf(folder, tmp_path / "m.gguf", "f32")
    if high == 5.0:  # a file does not tell this one, and no model that was released has it
        with pytest.raises(BirlError, match=r"embedding is scaled \(rope_freqs.weight\) in a way that is not read"):
            resolve(str(tmp_path / "m.gguf"))
        return
    own, again = (load_model(f)(ids).logits for f in (folder, resolve(str(tmp_path / "m.gguf"))))
    assert torch.allclose(own, again, atol=1e-5) and not torch.allclose(own, plain, atol=1e-2)


@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias"])
def test_biases_that_are_not_read_again_are_refused(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers passed over them: the file was read as another model."""
    monkeypatch.setenv("BIRL_CACHE", str(tmp_path / "cache"))
    to_gguf(saved("llama", tmp_path / "model", **{key: True}), tmp_path / "m.gguf", "f32")
    with pytest.raises(BirlError, match=r"has a tensor blk\.0\..*\.bias, which is not read from .gguf files of llama"):
        resolve(str(tmp_path / "m.gguf"))
    if key == "attention_bias":
        with pytest.raises(BirlError, match="has no biases in the layers of qwen3"):
            to_gguf(saved("qwen3", tmp_path / "other", attention_bias=True), tmp_path / "x.gguf")


def test_of_a_run(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i} + 1?", "response": str(i + 1)}) + "\n" for i in range(8)))
    quiet = ("track.console=off", "track.tensorboard=false", "model.dtype=float32", "batch_size=4", "steps=1")
    assert main(["sft", f"model={tiny}", f"data.train=[{rows}]", f"run={tmp_path}/run", *quiet]) == 0
    words = ["checkpoints", f"{tmp_path}/run", "export", "last"]
    assert main([*words, f"{tmp_path}/my/model.gguf", "--type", "q8_0"]) == 0
    assert "step-000001" in (told := capsys.readouterr().out) and "model.gguf (q8_0)" in told
    assert [p.name for p in (tmp_path / "my").iterdir()] == ["model.gguf"]
    assert main([*words, f"{tmp_path}/my/model.gguf"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([*words, f"{tmp_path}/x.gguf", "--type", "q3"]) == 2
    assert "--type q3: expected one of f16, bf16, f32, q8_0" in capsys.readouterr().err


def test_what_has_no_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BirlError, match="gemma3_text has no form as GGUF here, only llama, mistral, qwen2"):
        to_gguf(saved("gemma3_text", tmp_path / "gemma"), tmp_path / "x.gguf")
    folder = saved("llama", tmp_path / "model")
    with torch.no_grad():
        large = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        large.lm_head.weight[0, 0] = 1e6
    large.save_pretrained(tmp_path / "large")
    tiny_tokenizer().save_pretrained(tmp_path / "large")
    with pytest.raises(BirlError, match=r"lm_head.weight has values that float16 cannot hold. Use --type bf16."):
        to_gguf(tmp_path / "large", tmp_path / "x.gguf")
    config = json.loads((folder / "config.json").read_text())
    stretched = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": stretched}))
    with pytest.raises(BirlError, match="rotary embeddings of the kind yarn"):
        to_gguf(folder, tmp_path / "x.gguf")
    (folder / "config.json").write_text(json.dumps(config))
    other = PreTrainedTokenizerFast.from_pretrained(folder)
    other.backend_tokenizer.pre_tokenizer = None  # pyright: ignore
    other.save_pretrained(folder)
    with pytest.raises(BirlError, match="no name for the way its tokenizer splits texts"):
        to_gguf(folder, tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists() and not [*tmp_path.glob(".*")]


@pytest.mark.parametrize("form", ["f16", "q8_0"])
def test_llama_cpp_samples_the_same_tokens(form: str, tmp_path: Path) -> None:
    """Greedy, of SmolLM2, whose numbers are split into digits; up to where rounding may choose the token."""
    folder, asked = resolve("smollm2"), "Count: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,"
    to_gguf(folder, tmp_path / "m.gguf", form)
    text, _ = asked_of_llama_cpp(tmp_path / "m.gguf", asked)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), load_tokenizer(folder)
    ids = tokenizer(asked, return_tensors="pt").input_ids
    options = {"max_new_tokens": 24, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    result = model.generate(ids, **options)  # pyright: ignore
    best = torch.cat(result.scores).topk(2).values
    sure = int((best[:, 0] - best[:, 1] > 1.0).int().cumprod(0).sum())
    reply = tokenizer.decode(result.sequences[0, ids.shape[1] :][:sure])
    assert sure >= 9 and text.startswith(reply)


@pytest.mark.parametrize("kind", FORMS)
def test_llama_cpp_computes_every_architecture(kind: str, tmp_path: Path) -> None:
    """Its cache of keys and values is float16."""
    folder, prompt = saved(kind, tmp_path / "model"), [*range(3, 40)]
    to_gguf(folder, tmp_path / "m.gguf", "f32")
    ids, told = zip(*asked_of_llama_cpp(tmp_path / "m.gguf", prompt)[1], strict=True)
    with torch.no_grad():
        own = load_model(folder)(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)[list(ids)]
    assert len(ids) == 20 and torch.allclose(own, torch.tensor(told), atol=3e-2)


def test_what_llama_cpp_computes_otherwise_is_refused(tmp_path: Path) -> None:
    """Its layers have one activation for each architecture, and no window: such a file was another model."""
    cases = {
        "llama": ({"hidden_act": "gelu"}, "llama.cpp computes llama with silu, not with gelu"),
        "mistral": ({"sliding_window": 16}, "layers with a window"),
        "starcoder2": ({"use_bias": False}, "llama.cpp needs biases in the layers of starcoder2"),
    }
    for kind, (options, why) in cases.items():
        with pytest.raises(BirlError, match=why):
            to_gguf(saved(kind, tmp_path / kind, **options), tmp_path / "x.gguf")
