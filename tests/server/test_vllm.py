"""What only vLLM has: its part of birl, its start command, and its traps."""

import ast
import asyncio
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from starlette.responses import JSONResponse
from transformers import AutoImageProcessor

from birl.engines.vllm import check_normalized, command, environment, write_plugin
from birl.engines.vllm import plugin as vllm_plugin
from birl.errors import BirlError, EngineDown, WeightsFailed
from birl.models.digests import digest, digests
from birl.models.load import load_tokenizer
from birl.models.vision import give, load_pictures
from birl.text.pictures import Bounds
from birl.types import Picture, Update
from tests import sights
from tests.engine.test_update import PROMPT, params, weights
from tests.server.test_adapters import pair, update


def test_the_plugin_needs_nothing_that_vllms_environment_may_lack(tmp_path) -> None:
    source = Path(vllm_plugin.__file__).read_text()
    top = [n for n in ast.parse(source).body if isinstance(n, ast.Import | ast.ImportFrom)]
    names = {(n.module if isinstance(n, ast.ImportFrom) else n.names[0].name).partition(".")[0] for n in top}  # type: ignore[union-attr]
    assert names <= set(sys.stdlib_module_names) | {"torch", "safetensors"}
    program = (
        "import sys; sys.modules['xxhash'] = None\n"
        "import birl_vllm_plugin as p; print(*p.Weights().birl_hashes(), 'birl' in sys.modules)"
    )
    env = environment(base={"PYTHONPATH": "elsewhere"})
    assert env["PYTHONPATH"].endswith(":elsewhere")
    found = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    assert found.stdout.split() == ["sha256", "False"], found.stderr


@pytest.mark.parametrize(
    "tensor",
    [
        *(torch.arange(15.0).reshape(3, 5), torch.ones(4, dtype=torch.bfloat16), torch.arange(24.0).reshape(4, 6).T),
        *(torch.arange(2.0**14), torch.arange(99999.0).bfloat16()),
    ],
    ids=["float32", "bfloat16", "turned", "a piece", "several pieces"],
)
def test_the_plugin_digests_as_birl_does(tensor) -> None:
    assert vllm_plugin.fingerprint(tensor, "xxh3_128") == digest(tensor)
    assert vllm_plugin.fingerprint(tensor, "sha256") != vllm_plugin.fingerprint(tensor + 1, "sha256")


def test_the_plugin_reads_beside_sampling_and_forgets_what_it_refused(folders) -> None:
    worker = vllm_plugin.Weights()

    def staged() -> dict[str, object]:
        for _ in range(500):
            if (found := worker.birl_staged())["done"]:
                return found
            time.sleep(0.01)
        raise AssertionError("staging does not end")

    good = digests(weights(folders[0]))
    worker.birl_stage(str(folders[0]), "xxh3_128", good)
    assert staged() == {"done": True} and worker._birl_staged is not None
    worker.birl_stage(str(folders[1]), "xxh3_128", good)
    assert staged()["refused"] == "mismatch" and worker.birl_take()["message"] == "nothing was staged"
    worker.birl_stage(str(folders[0]), "xxh3_128", {**good, "lm_head.extra": "0"})
    assert staged()["refused"] == "missing" and "lm_head.extra is missing" in str(staged()["message"])


@pytest.mark.parametrize("right", [True, False])
async def test_without_xxhash_birl_compares_and_sends_other_hashes(folders, compute, right) -> None:
    adapter, double = pair("vllm", folders, compute)
    double.hashes = ("sha256",)  # pyright: ignore
    sent = update(folders[1], 1)
    if right:
        await adapter.load(sent)
        assert adapter.hash == "sha256" and adapter.version == 1
    else:
        with pytest.raises(WeightsFailed) as caught:
            await adapter.load(replace(sent, folder=str(folders[0])))
        assert caught.value.cause == "mismatch"


async def test_keys_and_values_are_dropped_only_where_they_are_computed_anew(folders, compute) -> None:
    for recompute in (True, False):
        adapter, double = pair("vllm", folders, compute, recompute_kv=recompute)
        await adapter.load(update(folders[1], 1))
        assert f"/reset_prefix_cache?reset_running_requests={str(recompute).lower()}" in double.calls
        assert double.calls.index("/pause?mode=keep&clear_cache=false") < double.calls.index("/update_weight_version")
        assert double.calls[-1] == "/resume"


async def test_waking_brings_the_cache_back_last(folders, compute) -> None:
    """vLLM goes on computing as soon as it has all of its memory, with weights or without."""
    adapter, double = pair("vllm", folders, compute)
    await adapter.sleep()
    await adapter.wake()
    await adapter.load(update(folders[0], 1))
    await adapter.resume()
    asked = [c for c in double.calls if c.startswith(("/sleep", "/wake_up", "/update_weight_version", "/resume"))]
    assert asked == [
        *(
            "/sleep?level=2&mode=keep",
            "/wake_up?tags=weights",
            "/update_weight_version",
            "/wake_up?tags=kv_cache",
            "/resume",
        )
    ]


async def test_a_server_that_reports_other_log_probs_is_refused(folders, compute) -> None:
    adapter, double = pair("vllm", folders, compute)
    double.mode = "raw_logprobs"  # pyright: ignore
    with pytest.raises(BirlError, match="--logprobs-mode processed_logprobs"):
        await adapter.generate(PROMPT, params(4))


async def test_what_is_no_number_is_no_answer(folders, compute) -> None:
    adapter, double = pair("vllm", folders, compute)
    content = [{"token_id": 5, "logprob": -9999.0}]
    choice = {"token_ids": [5], "finish_reason": "length", "logprobs": {"content": content}}
    spans = [{"version": "default", "start": 0, "end": 1}]
    for versions, said in ((spans, "no number"), ([], "log-prob"), (None, "log-prob")):
        double.fail["/inference/v1/generate"] = JSONResponse({"choices": [{**choice, "weight_versions": versions}]})
        with pytest.raises(EngineDown, match=said):
            await adapter.generate(PROMPT, params(1))
    content[0]["logprob"] = -1.0
    double.fail["/inference/v1/generate"] = JSONResponse({"choices": [{**choice, "weight_versions": []}]})
    with pytest.raises(EngineDown, match="weight_versions has 0 tokens"):
        await adapter.generate(PROMPT, params(1))
    double.labels[0] = "mine"
    with pytest.raises(BirlError, match="update_weight_version"):
        await adapter.info()


async def test_the_words_that_were_kept_are_those_with_a_log_prob(folders, compute) -> None:
    adapter, double = pair("vllm", folders, compute)
    asked = replace(params(12), top_k=9, top_p=0.9, support=True)
    answer = (await adapter.generate(PROMPT, asked)).possible()
    own = await double.engine.generate(PROMPT, asked)
    assert answer.ids == own.ids and answer.support == own.support and own.support is not None
    assert (await adapter.generate(PROMPT, replace(asked, support=False))).support is None
    content = [{"token_id": 5, "logprob": -1.0, "top_logprobs": [{"token_id": 5, "logprob": -1.0}]}]
    choice = {"token_ids": [5], "finish_reason": "length", "logprobs": {"content": content}}
    choice["weight_versions"] = [{"version": "default", "start": 0, "end": 1}]
    double.fail["/inference/v1/generate"] = JSONResponse({"choices": [choice]})
    with pytest.raises(BirlError, match="tie with the last of top_k"):
        await adapter.generate(PROMPT, replace(asked, max_tokens=1))


async def test_a_request_that_leaves_is_no_longer_listed(folders, compute) -> None:
    adapter, double = pair("vllm", folders, compute)
    task = asyncio.create_task(adapter.generate(PROMPT, params(400)))
    while not double.bodies:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not adapter.peer.open and await adapter.abort() == 0


async def test_pictures_are_sent_as_files_and_their_tokens_are_compared(tmp_path, compute) -> None:
    folder = sights.folder(tmp_path / "m")
    shown = [Picture.of(sights.drawn("7")), Picture.of(sights.drawn("3", (16, 32), "yellow"))]
    adapter, double = pair("vllm", [folder], compute)
    model = double.engine.runner.model
    own, theirs = (load_pictures(folder, model, load_tokenizer(folder), Bounds()) for _ in range(2))
    assert own is not None and theirs is not None
    give(model, theirs)
    double.pictures = theirs  # pyright: ignore
    prompt, other = (p.encode("Hi <|image_pad|>, <|image_pad|>?", iter(shown)) for p in (own, theirs))
    with pytest.raises(BirlError, match=r"gets tokens only: set engine\.kind=embedded, birl or vllm"):
        await adapter.generate(prompt, params(12))
    adapter.pictures = own
    expected = await double.engine.generate(other, params(12))
    assert await adapter.generate(prompt, params(12)) == expected
    sent = double.bodies[-1]
    assert sent["token_ids"].count(own.id) == 2 and [p["uuid"] for p in sent["content_parts"]] == [
        picture.digest for picture in shown
    ]
    assert (await adapter.generate(PROMPT, params(4))).ids and "content_parts" not in double.bodies[-1]
    sums = digests(weights(folder, torch.float32))
    await adapter.load(Update(version=1, digests=sums, folder=str(folder)))
    assert double.calls.index("/reset_encoder_cache") < double.calls.index("/resume")
    double.fail["/inference/v1/generate"] = JSONResponse({"prompt_token_ids": sent["token_ids"], "choices": []})
    with pytest.raises(BirlError, match=r"other tokens for a prompt with pictures \(8 instead of 20\)"):
        await adapter.generate(prompt, params(4))


def test_a_folder_without_mean_and_deviation_of_pixels_is_refused(tmp_path) -> None:
    folder = sights.folder(tmp_path / "m")
    check_normalized(folder)
    file = folder / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    del settings["image_mean"]
    file.write_text(json.dumps(settings))
    with pytest.raises(BirlError, match=r"preprocessor_config\.json has no image_mean and image_std"):
        check_normalized(folder)
    AutoImageProcessor.from_pretrained(folder).save_pretrained(folder)
    check_normalized(folder)


def test_the_start_command(tmp_path) -> None:
    line = command(
        model="m", port=8000, python="py", tensor_parallel=2, memory_fraction=0.8, context=512, extra=["--x"]
    )
    text = " ".join(line)
    assert text.startswith("py -m vllm.entrypoints.openai.api_server --model m --host 127.0.0.1 --port 8000")
    for part in ("--logprobs-mode processed_logprobs", "--enable-scale-out", "--tensor-parallel-size 2"):
        assert part in text
    assert "--worker-extension-cls birl_vllm_plugin.Weights" in text and line[-1] == "--x"
    taking = command(model="m", port=1, transfer="nccl")
    assert taking[taking.index("--weight-transfer-config") + 1] == '{"backend": "nccl"}'
    env = environment(cpu=True, kv_cache_gb=2, threads="0-1", base={})
    assert (env["VLLM_CPU_KVCACHE_SPACE"], env["VLLM_CPU_OMP_THREADS_BIND"]) == ("2", "0-1")
    assert env["VLLM_SERVER_DEV_MODE"] == "1" and env["PYTHONPATH"] == str(write_plugin())
    assert (write_plugin(tmp_path / "p") / "birl_vllm_plugin.py").read_text() == Path(vllm_plugin.__file__).read_text()
    json.dumps(env)
