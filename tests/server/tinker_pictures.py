"""Runs in .venv-tinker: pictures in requests of Tinker's own client; says what it saw as JSON.

Words: a folder with one.png, two.png, large.png and one.gif; the key of another tenant.
"""

import json
import os
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tinker
from tinker import types

from tests.server.tinker_quotas import error

warnings.simplefilter("ignore")
FOLDER, OTHER = Path(sys.argv[1]), sys.argv[2]
TOKENS = {"one": 6, "two": 8}
ANSWER = [40, 41, 42, 43]


def picture(name: str, expected: int | None = None, **options: Any) -> types.ImageChunk:
    data = (FOLDER / f"{name}.png").read_bytes()
    return types.ImageChunk(data=data, format=options.get("format", "png"), expected_tokens=expected)


def prompt(name: str) -> types.ModelInput:
    text = types.EncodedTextChunk
    return types.ModelInput(chunks=[text(tokens=[5, 6]), picture(name, TOKENS[name]), text(tokens=[7, 8])])


def datum(name: str, answer: list[int], **inputs: Any) -> types.Datum:
    """The answer behind the prompt; what stands for a picture is no target, as the cookbook has it."""
    before = prompt(name)
    whole = types.ModelInput(chunks=[*before.chunks, types.EncodedTextChunk(tokens=answer[:-1])])
    pad = before.length - 1
    own = inputs or {"weights": [0.0] * pad + [1.0] * len(answer)}
    return types.Datum(model_input=whole, loss_fn_inputs={"target_tokens": [0] * pad + answer, **own})


def learned(service: tinker.ServiceClient, name: str) -> dict[str, Any]:
    client = service.create_lora_training_client("sees", rank=4, seed=3).result()
    client.save_state("first").result()
    data = [datum(name, ANSWER), datum(name, [*ANSWER, 44])]  # they begin alike
    before = client.forward(data, "cross_entropy").result().loss_fn_outputs
    taught = client.forward_backward(data, "cross_entropy").result().loss_fn_outputs
    norm = client.optim_step(types.AdamParams(learning_rate=0.02)).result().metrics
    state = client.save_state("state").result().path
    sampler = client.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=6, seed=5, stop=[])
    sampled = sampler.sample(prompt(name), 2, params, include_prompt_logprobs=True, topk_sample_logprobs=2).result()
    again = [datum(name, list(s.tokens)) for s in sampled.sequences]
    after = client.forward([*data, *again], "cross_entropy").result().loss_fn_outputs
    rows = [[o["logprobs"].tolist() for o in each] for each in (before, taught, after)]
    return {
        "before": rows[0], "taught": rows[1], "after": rows[2][:2], "again": rows[2][2:], "norm": norm,
        "state": state, "sampled": [[list(s.tokens), list(s.logprobs or ())] for s in sampled.sequences],
        "prompt": sampled.prompt_logprobs, "top": len(sampled.sequences[0].topk_logprobs or ()),
    }  # fmt: skip


def refused(service: tinker.ServiceClient) -> dict[str, str]:
    client = service.create_lora_training_client("sees", rank=4).result()
    lost = service.create_lora_training_client("sees", rank=4).result()  # the client skips a number where it raises
    sampler = service.create_sampling_client(base_model="sees").result()

    def sample(*chunks: Any) -> str:
        asked = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[5]), *chunks])
        return error(lambda: sampler.sample(asked, 1, types.SamplingParams(max_tokens=1)).result())

    def forward(*chunks: Any, by: Any = client) -> str:
        asked = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[5]), *chunks])
        one = types.Datum(model_input=asked, loss_fn_inputs={"target_tokens": [5] * 7, "weights": [1.0] * 7})
        return error(lambda: by.forward([one], "cross_entropy").result())

    pointer = types.ImageAssetPointerChunk(format="png", location="file:///etc/passwd", expected_tokens=6)
    gif = types.ImageChunk(data=(FOLDER / "one.gif").read_bytes(), format="png")
    result = {
        "count": sample(picture("one", 7)), "count in training": forward(picture("one", 5)),
        "large": sample(picture("large")), "large in training": forward(picture("large")),
        "many": sample(*[picture("one")] * 4), "gif": sample(gif),
        "format": forward(picture("one", format="jpeg")),
        "none": sample(types.ImageChunk(data=b"\x89PNG\r\n\x1a\nxx", format="png")),
        "pointer": sample(pointer), "pointer in training": forward(pointer, by=lost),
        "sound": sample(types.DmelChunk(dmel=b"x")), "sound in training": forward(types.DmelChunk(dmel=b"x")),
        "target": error(lambda: client.forward([datum("one", [2**30])], "cross_entropy").result()),
        "id": sample(types.EncodedTextChunk(tokens=[2**30 + 5])),
    }  # fmt: skip
    result["goes on"] = str(len(client.forward([datum("one", ANSWER)], "cross_entropy").result().loss_fn_outputs))
    return result


def main() -> None:
    names = ("one", "two")
    with tinker.ServiceClient() as alice, tinker.ServiceClient(api_key=OTHER) as bob:
        alone = [learned(*each) for each in zip((alice, bob), names, strict=True)]
        with ThreadPoolExecutor(2) as both:
            beside = list(both.map(learned, (alice, bob), names))
        print("TOLD " + json.dumps({"alone": alone, "beside": beside, "refused": refused(alice)}), flush=True)


main()
os._exit(0)
