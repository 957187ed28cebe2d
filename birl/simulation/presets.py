"""Hardware by name. Nothing here was measured by us: the sources say so, and the formula of each figure."""

from collections.abc import Callable
from typing import Any


def h200() -> dict[str, Any]:
    """An 8-billion-parameter model in bfloat16 on H200s, 8 of them a learner, from the public data sheet alone: 989
    TFLOP/s, 4.8 TB/s, 50 GB/s between machines."""
    flops, memory, network = 989e12, 4.8e12, 50e9
    parameters, learner_gpus = 8e9, 8
    kv_bytes = 2 * 2 * 36 * 8 * 128  # of one token: keys and values in bfloat16, 36 layers, 8 heads of 128
    replica = learner_gpus * flops * 0.4
    return {
        "engine": {
            "base": 2 * parameters / (memory * 0.6),
            "per_sequence": 2 * parameters / (flops * 0.5),
            "per_context": kv_bytes / (memory * 0.6),
            "prefill": flops * 0.5 / (2 * parameters),
            "max_batch": 256,
        },
        "learner": {
            "gpus": learner_gpus,
            "constant": 0.5,
            "per_token": 6 * parameters / replica,
            "bytes": 2 * parameters,
            "bandwidth": network,
        },
        "sync": {"pause": 0.5, "bytes": 2 * parameters, "bandwidth": network * 0.5, "switch": 5.0},
        "episodes": {"prompt": 256, "mean": 2000, "sigma": 0.8, "max": 16384},
        "run": {"group_size": 16},
        "sources": {
            "engine.base": "assumed: weights [bytes] / (0.6 x 4.8 TB/s)",
            "engine.per_sequence": "assumed: 2 x parameters / (0.5 x 989 TFLOP/s)",
            "engine.per_context": "assumed: 147,456 bytes of keys and values / (0.6 x 4.8 TB/s)",
            "engine.prefill": "assumed: 0.5 x 989 TFLOP/s / (2 x parameters)",
            "learner.per_token": "assumed: 6 x parameters / (0.4 x 8 x 989 TFLOP/s)",
            "learner.bandwidth": "assumed: 400 Gbit/s",
            "learner.bytes": "computed: bfloat16 gradient",
            "sync.bytes": "computed: bfloat16 weights",
            "sync.bandwidth": "assumed: half of 400 Gbit/s",
            **dict.fromkeys(("engine", "learner", "sync", "episodes", "run"), "assumed"),
        },
    }


PRESETS: dict[str, Callable[[], dict[str, Any]]] = {"smollm2_cpu": dict, "h200_8b": h200}  # the first: the defaults
