"""What only SGLang has. Its double checks requests and answers with SGLang's own contract."""

import msgspec
import pytest
from starlette.responses import JSONResponse

from birl.engines.sglang import SGLang, command, environment
from birl.errors import BirlError, EngineDown
from tests.engine.test_update import PROMPT, params
from tests.server.sglang_api_types import GenerateRequest
from tests.server.test_adapters import pair, update


def test_the_contract_refuses_what_sglang_refuses() -> None:
    """Otherwise the double proves nothing."""
    with pytest.raises(msgspec.ValidationError, match="foo"):
        GenerateRequest.from_json_value({"rid": "x", "input_ids": [1], "sampling_params": {"foo": 1}})


async def test_log_probs_that_sglang_reports_wrongly_are_refused(folders, compute) -> None:
    adapter, _ = pair("sglang", folders, compute)
    for wrong in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}):
        with pytest.raises(BirlError, match="before top_p"):
            await adapter.generate(PROMPT, params(5, **wrong))


@pytest.mark.parametrize(("recompute", "mode"), [(True, "retract"), (False, "in_place")])
async def test_how_it_pauses(folders, compute, recompute, mode) -> None:
    """What keeps its keys and values can not have the cache emptied under it."""
    adapter, double = pair("sglang", folders, compute, recompute_kv=recompute)
    seen = {}
    call = adapter.peer.call

    async def watched(method, path, **keys):
        seen[path] = keys.get("json")
        return await call(method, path, **keys)

    adapter.peer.call = watched
    await adapter.load(update(folders[1], 1))
    assert seen["/pause_generation"] == {"mode": mode}
    assert seen["/update_weights_from_disk"]["flush_cache"] is recompute
    assert double.calls[-1] == "/continue_generation"


async def test_an_abort_by_sglang_itself_is_no_answer(folders, compute) -> None:
    adapter, double = pair("sglang", folders, compute)
    reason = {"type": "abort", "message": "out of room", "status_code": 503, "err_type": "x"}
    double.fail["/generate"] = JSONResponse({"output_ids": [], "meta_info": {"finish_reason": reason}})
    with pytest.raises(EngineDown, match="out of room"):
        await adapter.generate(PROMPT, params(5))


async def test_a_pause_has_an_end(folders, compute) -> None:
    adapter, _ = pair("sglang", folders, compute, timeout=0.1)
    await adapter.pause()
    with pytest.raises(EngineDown, match="paused"):
        await adapter.generate(PROMPT, params(5))


def test_the_start_command() -> None:
    text = " ".join(
        command(model="m", port=30000, python="py", tensor_parallel=2, context=512, cpu=True, extra=["--x"])
    )
    assert text.startswith("py -m sglang.launch_server --model-path m --host 127.0.0.1 --port 30000")
    assert "--tp-size 2" in text and "--device cpu" in text and text.endswith("--x")
    assert "--api-key s3 --admin-api-key s3" in " ".join(command(model="m", port=1, token="s3"))
    env = environment(cpu=True, base={"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"})
    assert env["SGLANG_USE_CPU_ENGINE"] == "1" and "SGLANG_RETURN_ORIGINAL_LOGPROB" not in env
    assert SGLang("http://engine/", token="s3").peer.client.headers["authorization"] == "Bearer s3"
