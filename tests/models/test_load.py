"""A model folder is taken whole or refused with a message that names it: nothing is left out or made up silently."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, PreTrainedTokenizerFast

from birl.config.schema import Model
from birl.errors import BirlError
from birl.learner.policy import load_policy
from birl.models import attention
from birl.models.load import (
    check_vocabulary,
    context_limit,
    end_ids,
    load_model,
    load_tokenizer,
    resolve,
    save_hf_config,
)
from birl.models.slices import sketched
from tests.tiny import CHATML, tiny_model, tiny_model_folder, tiny_tokenizer
from tests.zoo import build


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model_folder(tmp_path / "model")


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_weights_are_float32_and_attention_is_ours(folder: Path) -> None:
    tiny_model().to(torch.bfloat16).save_pretrained(folder)
    model = load_model(folder)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config._attn_implementation == attention.NAME  # pyright: ignore
    assert not model.training


def test_the_loaded_model_computes_what_the_saved_one_did(plain: Path) -> None:
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            load_model(plain)(ids).logits, tiny_model(heads=4, kv_heads=2)(ids).logits, atol=1e-5, rtol=0
        )


def test_threads_may_load_at_once(plain: Path) -> None:
    """transformers takes weight tying away from the whole process while it loads: the others' lm_head was missing."""
    expected = dict(load_model(plain).named_parameters())
    with ThreadPoolExecutor(3) as threads:
        for model in threads.map(load_model, [plain] * 6):
            assert all(torch.equal(p, expected[n]) for n, p in model.named_parameters())


def test_untied_embeddings_stay_apart(folder: Path) -> None:
    change_config(folder, tie_word_embeddings=False)
    change_weights(folder, lambda w: w.update({"lm_head.weight": torch.ones_like(w["model.embed_tokens.weight"])}))
    assert load_model(folder).get_output_embeddings().weight.eq(1).all()  # pyright: ignore


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_tied_weight_that_is_stored_twice_has_the_same_values(factor: float, folder: Path) -> None:
    """transformers took another one apart, a split model (`sketched`) gave its values to both, and vLLM passes over
    it."""
    change_weights(folder, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"] * factor}))
    for load in (load_model, lambda path: sketched(path, torch.device("cpu"))):
        if factor == 1.0:
            model: Any = load(folder)
            assert model.lm_head.weight is model.model.embed_tokens.weight
            continue
        with pytest.raises(BirlError, match=r"lm_head\.weight and model\.embed_tokens\.weight have different values"):
            load(folder)


def without(*names: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).unlink() for name in names] and None


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def emptied(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def shard_lost(folder: Path) -> None:
    weight_map = dict.fromkeys(load_file(folder / "model.safetensors"), "model-00001-of-00002.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def weight_lost(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.pop("model.norm.weight"))


def weight_added(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update({"model.layers.7.mlp.bias": torch.zeros(3)}))


def weight_reshaped(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update({"model.norm.weight": torch.zeros(7)}))


def bigger_config(folder: Path) -> None:
    change_config(folder, num_hidden_layers=3)


def unknown_architecture(folder: Path) -> None:
    change_config(folder, model_type="brandnew")


def own_code(folder: Path) -> None:
    change_config(folder, model_type="brandnew", auto_map={"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"})
    (folder / "code.py").write_text("raise SystemExit('this code must never run')")


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def index(content: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "part.safetensors")
        (folder / "model.safetensors.index.json").write_text(content)

    return damage


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without("config.json"), ["config.json is missing"]),
        (without("model.safetensors"), ["no weights", "model.safetensors"]),
        (text("config.json", '{"model_type": '), ["config.json", "not a valid JSON"]),
        (text("config.json", "null"), ["config.json", "not a valid JSON object"]),
        (text("config.json", "[" * 100_000), ["config.json", "not a valid JSON object", "nested too deep"]),
        (index('{"weight_map": []}'), ["model.safetensors.index.json cannot be read", "names no file"]),
        (index('{"weight_map": {"a": "../b"}}'), ["'../b' leads out of the folder"]),
        (index('{"weight_map": {"a": "/b.safetensors"}}'), ["'/b.safetensors' leads out of the folder"]),
        (truncated, ["model.safetensors is damaged", "again"]),
        (emptied, ["model.safetensors is damaged", "again"]),
        (pickled, ["no weights", "pytorch_model.bin", "convert it to safetensors"]),
        (shard_lost, ["model-00001-of-00002.safetensors"]),
        (weight_lost, ["missing model.norm.weight", "config.json"]),
        (weight_added, ["unexpected model.layers.7.mlp.bias"]),
        (weight_reshaped, ["mismatched model.norm.weight", "(7,) instead of (64,)"]),
        (bigger_config, ["missing model.layers.2"]),
        (unknown_architecture, ["brandnew"]),
        (own_code, ["custom code"]),
        (text("generation_config.json", "{"), ["generation_config.json is not a valid JSON object"]),
    ],
)
def test_a_damaged_folder_is_refused_by_name(
    folder: Path, damage: Callable[[Path], None], words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    damage(folder)
    with pytest.raises(BirlError) as error:
        load_model(folder)
    message = str(error.value)
    assert str(folder) in message
    assert all(word in message for word in words), message
    assert "\n" not in message and "Loading" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without("tokenizer.json"), ["has no tokenizer", "tokenizer.json"]),
        (text("tokenizer.json", "{"), ["tokenizer cannot be loaded"]),
        (text("tokenizer_config.json", "{"), ["tokenizer cannot be loaded"]),
        (text("config.json", "[]"), ["config.json", "not a valid JSON object"]),
        (partial(change_config, hidden_size="x"), ["'hidden_size'", "expected int"]),
    ],
)
def test_a_damaged_tokenizer_is_refused_by_name(
    folder: Path, damage: Callable[[Path], object], words: list[str]
) -> None:
    damage(folder)
    with pytest.raises(BirlError) as error:
        load_tokenizer(folder)
    assert all(word in str(error.value) for word in (str(folder), *words)), error.value


def test_a_chat_template_file_replaces_the_tokenizers_own(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "plain.jinja"
    file.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}", encoding="utf-8")
    assert load_tokenizer(tiny).chat_template == CHATML
    assert load_tokenizer(tiny, str(file)).chat_template == file.read_text()


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_a_chat_template_that_cannot_be_read_is_named(tiny: Path, tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "some.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BirlError, match=r"model\.chat_template=.*some\.jinja"):
        load_tokenizer(tiny, str(file))


def test_a_tokenizer_larger_than_the_embedding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_vocabulary(tiny_model(vocab=320), tiny_tokenizer(320))
    check_vocabulary(tiny_model(vocab=400), tiny_tokenizer(320))  # padded embeddings are common
    with pytest.raises(BirlError, match="320 tokens, the model only 300"):
        check_vocabulary(tiny_model(vocab=300), tiny_tokenizer(320))
    gap = tiny_tokenizer(320)
    monkeypatch.setattr(gap, "get_vocab", lambda: {"a": 0, "b": 1000})
    with pytest.raises(BirlError, match="1001 tokens, the model only 400"):
        check_vocabulary(tiny_model(vocab=400), gap)


def test_they_are_compared_where_they_meet(folder: Path) -> None:
    tiny_tokenizer(330).save_pretrained(folder)
    with pytest.raises(BirlError, match="do not belong together"):
        load_policy(Model(path=str(folder)), ThreadPoolExecutor(1))


def test_replies_end_where_the_model_says_so_too(folder: Path) -> None:
    GenerationConfig(eos_token_id=[0], pad_token_id=2).save_pretrained(folder)
    chat = load_policy(Model(path=str(folder)), ThreadPoolExecutor(1)).chat
    assert chat.parse((*chat.encode("7"), 0)).content == "7"
    assert chat.parse((*chat.encode("7"), 2)).content == "7"


@pytest.mark.parametrize("path", ["nobody/nothing", "./nowhere", "/no/such/folder", "three words here"])
def test_what_is_neither_a_folder_nor_on_the_hub_is_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(BirlError) as error:
        resolve(path)
    message = str(error.value)
    assert f"model.path={path}" in message and "smollm2" in message and "\n" not in message


def test_a_path_is_resolved_to_its_folder(tiny: Path, tmp_path: Path) -> None:
    assert resolve(str(tiny)) == tiny
    with pytest.raises(BirlError, match=r"absent\.gguf: there is no such file"):
        resolve(str(tmp_path / "absent.gguf"))
    with pytest.raises(BirlError, match="is a file; expected a folder"):
        resolve(str(tiny / "config.json"))


@pytest.mark.parametrize(
    ("configured", "expected"), [(2, {2}), (0, {0, 2}), ([0, 5], {0, 2, 5}), ([2], {2}), (None, {2})]
)
def test_every_configured_end_token_ends_an_answer(
    folder: Path, configured: int | list[int] | None, expected: set[int]
) -> None:
    GenerationConfig(eos_token_id=configured, pad_token_id=2).save_pretrained(folder)
    assert end_ids(load_model(folder), load_tokenizer(folder)) == expected


def test_end_tokens_without_a_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert end_ids(load_model(folder), load_tokenizer(folder)) == {2}


def test_the_end_token_of_the_chat_template_ends_an_answer(tiny: Path) -> None:
    """The files of a base model name the end of a text alone: its answers went on as the next questions."""
    model, tokenizer = load_model(tiny), load_tokenizer(tiny)
    tokenizer.eos_token, cast(Any, model).generation_config = "<|endoftext|>", GenerationConfig()
    assert end_ids(model, tokenizer) == {0, 2}
    tokenizer.add_tokens(["<|END_RESPONSE|>"], special_tokens=True)  # Cohere writes two
    tokenizer.chat_template = CHATML.replace("['content'] + '<|im_end|>'", "['content'] + '<|END_RESPONSE|><|im_end|>'")
    assert end_ids(model, tokenizer) == {0, tokenizer.convert_tokens_to_ids("<|END_RESPONSE|>")}
    tokenizer.chat_template = CHATML.replace("['content'] + '<|im_end|>'", "['content']")
    assert end_ids(model, tokenizer) == {0}


def test_the_end_token_counts_even_where_it_pads(tiny: Path) -> None:
    tokenizer = load_tokenizer(tiny)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    assert tokenizer.eos_token_id in end_ids(load_model(tiny), tokenizer)


def test_weights_are_downloaded_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some repositories have them for other programs, too; `*` of the hub's patterns is also a slash."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **words: asked.update(words) or str(folder))
    assert resolve("someone/something") == folder
    files = ["config.json", "model-00001-of-00002.safetensors", "original/model.safetensors", "metal/model.bin"]
    files += ["consolidated-00001-of-00002.safetensors", "chat_template.jinja", "tekken.json"]
    wanted = list(huggingface_hub.utils.filter_repo_objects(files, **asked))
    assert wanted == ["config.json", "model-00001-of-00002.safetensors", "chat_template.jinja", "tekken.json"]


def test_no_end_token_at_all() -> None:
    model = tiny_model()
    model.generation_config = GenerationConfig()
    backend = tiny_tokenizer().backend_tokenizer
    assert end_ids(model, PreTrainedTokenizerFast(tokenizer_object=backend)) == frozenset()


def test_the_context_limit_is_the_configs_whatever_it_calls_it(tiny: Path) -> None:
    assert context_limit(load_model(tiny)) == 512
    assert context_limit(build("gpt2", n_positions=96)) == 96


def test_a_saved_configuration_makes_a_model_folder_with_the_weights_alone(tiny: Path, tmp_path: Path) -> None:
    model, tokenizer = load_model(tiny), load_tokenizer(tiny)
    save_hf_config(model, tokenizer, tmp_path)
    own, theirs = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path, tiny))
    assert own == theirs  # it had `use_cache: false`
    assert not list(tmp_path.glob("*.safetensors"))
    save_file(load_file(tiny / "model.safetensors"), tmp_path / "model.safetensors", metadata={"format": "pt"})
    again, its_tokenizer = load_model(tmp_path), load_tokenizer(tmp_path)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    assert its_tokenizer.chat_template == tokenizer.chat_template
    assert its_tokenizer.get_vocab() == tokenizer.get_vocab()
    assert end_ids(again, its_tokenizer) == end_ids(model, tokenizer)


def test_loading_says_nothing(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_hf_config(load_model(folder), load_tokenizer(folder), folder)
    assert capfd.readouterr() == ("", "")
