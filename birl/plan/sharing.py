"""A GPU that learner and server share in turns (engine.sleep): the server's share, computed before either starts.

awake   the server has its share; the learner keeps weights, masters and AdamW's state, and frees the rest
asleep  the learner has all of it but the server's CUDA context
"""

from torch import nn

from birl.config import schema
from birl.errors import BirlError
from birl.plan.run_memory import CONTEXT, GIB, predict
from birl.plan.sizes import Module, load_of

# what the learner allocates for training, and frees before a server wakes
PASSING = (
    *("activations, then gradient", "activations", "gradient, float32", "gathered weights and gradients"),
    *("between blocks", "weights laid out", "logits", "a layer's backward", "gathered weights", "gathered gradients"),
)


def fraction_of(model: nn.Module, config: schema.RL, prompt: int, longest: int, total: int) -> float:
    """The share of a GPU of `total` bytes that a server may take while it is awake, at most engine.memory_fraction, for
    prompts and sequences of so many tokens. Raises `BirlError` if the learner leaves too little for the server's
    weights, or a training step does not fit even while the server sleeps."""
    kept = predict(model, config, load_of(config, prompt, longest), card=total)["training"]
    step = sum(kept.values()) + CONTEXT
    state = sum(size for name, size in kept.items() if name not in PASSING)
    split = config.engine.tensor_parallel * config.engine.pipeline_parallel
    module = Module.of(model, config.model.dtype)
    weights = module.wide * module.parameters // split
    room = total - state - CONTEXT
    fix = "Take LoRA (lora.rank), more GPUs, or a smaller model"
    if config.optimizer.offload == "none" and not config.lora.rank:
        fix = f"Set optimizer.offload=cpu. {fix}"
    if step > total and config.optimizer.offload == "none":  # else gradients are in CPU memory, too
        raise BirlError(
            f"engine.sleep=true: a training step needs {step / GIB:.1f} GiB while the server sleeps, and the GPU has "
            f"{total / GIB:.1f}. {fix}, or set a smaller learner.tokens_per_microbatch."
        )
    if room < weights:
        raise BirlError(
            f"engine.sleep=true: of the GPU's {total / GIB:.1f} GiB the learner keeps {state / GIB:.1f} while a server "
            f"samples (weights, AdamW's state, CUDA), and CUDA takes {CONTEXT / GIB:.1f} of the server; "
            f"{max(room, 0) / GIB:.1f} are left, and the server's weights alone are {weights / GIB:.1f}. {fix}."
        )
    return min(config.engine.memory_fraction, (room + CONTEXT) // (total // 1000) / 1000)
