"""Runs in .venv-tinker: Tinker's own client at the limits of a tenant; says what it saw as JSON."""

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import tinker
from tinker import types

warnings.simplefilter("ignore", FutureWarning)


def error(case: Callable[[], Any]) -> str:
    """The type that the client raises, and the reason."""
    try:
        case()
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    return "nothing"


def quotas() -> dict[str, str]:
    """Two sessions, two runs, three samplers, four checkpoints; see `test_tinker_client`."""
    result = {}
    first, second, third = (tinker.ServiceClient() for _ in range(3))
    client = first.create_lora_training_client("model", rank=4).result()
    second.create_lora_training_client("model", rank=4).result()
    result["sessions"] = error(lambda: third.create_sampling_client(base_model="model").result())
    result["runs"] = error(lambda: first.create_lora_training_client("model", rank=4).result())
    state = client.save_state("kept").result().path
    result["runs from a checkpoint"] = error(lambda: first.create_training_client_from_state(state).result())
    for _ in range(2):
        client.save_weights_and_get_sampling_client().result()
    sampler = first.create_sampling_client(base_model="model").result()
    result["samplers"] = error(lambda: first.create_sampling_client(base_model="model").result())
    result["samplers with weights"] = error(lambda: client.save_weights_and_get_sampling_client().result())
    client.save_state("last").result()
    result["checkpoints"] = error(lambda: client.save_state("more").result())
    client.save_state("last", overwrite=True).result()  # takes the place of one
    asked = types.ModelInput.from_ints([5, 6])
    result["goes on"] = str(len(sampler.sample(asked, 1, types.SamplingParams(max_tokens=2)).result().sequences))
    first.close("success").result()
    second.close("success").result()
    fourth = tinker.ServiceClient()  # what ended makes room; its checkpoints stay
    fourth.create_training_client_from_state(state).result()
    fourth.create_sampling_client(model_path=state).result()
    rest = tinker.RestClient()
    result["left"] = " ".join(sorted(c.checkpoint_id for c in rest.list_user_checkpoints().result().checkpoints))
    client = fourth.create_lora_training_client("model", rank=128).result()
    for checkpoint in rest.list_user_checkpoints().result().checkpoints:
        rest.delete_checkpoint_from_tinker_path(checkpoint.tinker_path).result()
    result["bytes"] = error(lambda: client.save_state("large").result())
    fourth.close("success").result()
    return result


if __name__ == "__main__":
    print("TOLD " + json.dumps(quotas()), flush=True)
    sys.exit(0)
