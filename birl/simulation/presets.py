"""Hardware by name. Nothing here was measured by us: the sources say so, and the formula of each figure."""

from typing import Any


def h200(parameters: float = 8e9, kv_bytes: float = 147_456, learner_gpus: int = 8) -> dict[str, Any]:
    """An 8-billion-parameter model in bfloat16 on H200s, from the public data sheet alone: 989 TFLOP/s, 4.8 TB/s,
    50 GB/s between machines. `kv_bytes`: of one token (36 layers, 8 heads of 128, keys and values)."""
    flops, memory, network = 989e12, 4.8e12, 50e9
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


PRESETS = {"smollm2_cpu": dict[str, Any], "h200_8b": h200}
