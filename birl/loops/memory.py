"""How much memory a run will need, before it starts. Estimates; `docs/runs.md` compares them with measured peaks."""

import shutil
import textwrap

from torch import nn

from birl.config import schema
from birl.engine.pages import pages_for
from birl.engine.runner import page_bytes
from birl.models.decoder import decoder_for, head_dim
from birl.models.fused_decoder import fused_for
from birl.models.logprobs import CHUNK, GPU_CHUNK
from birl.types import Task

GIB = 2**30
PROCESS = 0.6 * GIB  # interpreter, torch, transformers


def predict(model: nn.Module, config: schema.RL, *, reference: bool) -> dict[str, float]:
    """Bytes by purpose. Activations: what the layers of a Llama-like model keep for the backward pass (`Kept` in
    models/decoder.py, or what autograd keeps of transformers' module)."""
    parameters = sum(p.numel() for p in model.parameters())
    shape = model.config.get_text_config()  # pyright: ignore
    wide = 2 if config.model.dtype == "bfloat16" else 4
    hidden, inner, layers = (
        shape.hidden_size,
        getattr(shape, "intermediate_size", 4 * shape.hidden_size),
        shape.num_hidden_layers,
    )
    if decoder := decoder_for(model):
        layer = decoder.layers[0]
        heads = (2 * layer.heads + 2 * layer.kv_heads) * head_dim(model)  # queries, keys, values, their result
        per_layer = 8 * hidden + wide * (heads + 2 * inner) + 4 * layer.heads
    elif fused := fused_for(model):
        layer = fused.layers[0]
        heads = (3 * layer.heads + 4 * layer.kv_heads) * head_dim(model)  # keys and values once more, gathered
        per_layer = wide * (4 * hidden + heads + 3 * inner) + 4 * (2 + layer.heads)
    else:
        per_layer = wide * (12 * hidden + 4 * inner) + 4 * 4 * hidden  # norms keep float32 copies
    kept = hidden * 4 if config.learner.gradient_checkpointing else per_layer
    tokens = config.learner.tokens_per_microbatch
    cache = page_bytes(model) * config.engine.max_batch * pages_for(config.rollout.max_tokens * 2)
    return {
        "process": PROCESS,
        "weights, float32": 4.0 * parameters,
        "weights, compute type": 2.0 * parameters if wide == 2 else 0.0,
        "weights laid out for generation": float(wide * parameters),
        "gradient, float32": 4.0 * parameters,
        "optimizer state": 8.0 * parameters,
        "reference model": float(wide * parameters) if reference else 0.0,
        "activations": float(tokens * (layers * kept + per_layer)),
        "logits of one chunk": float(GPU_CHUNK * wide if fused_for(model) else CHUNK * 14),
        "keys and values": min(config.engine.kv_cache_gb * GIB, float(cache)),
    }


def render(prediction: dict[str, float], config: schema.RL, *, steps: int | None, task: Task, prompt: str) -> str:
    """The text that `--dry-run` prints."""
    total = sum(prediction.values())
    rows = [f"  {name:<34}{size / GIB:7.2f} GiB" for name, size in prediction.items() if size]
    width = min(shutil.get_terminal_size().columns, 120)
    return "\n".join(
        [
            f"Would train {config.model.path} for {steps or 'an unknown number of'} steps of {config.rollout.prompts} "
            f"prompts x {config.rollout.group_size} answers.",
            "",
            f"First prompt ({task.id}, answer {task.answer!r}):",
            textwrap.indent(textwrap.shorten(prompt, 4 * width, placeholder=" ..."), "  "),
            "",
            "Predicted memory:",
            *rows,
            f"  {'together':<34}{total / GIB:7.2f} GiB",
        ]
    )
