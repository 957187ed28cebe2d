"""A small random model of a config's architecture: few layers, tokens and expert features, short windows, and weights
large enough for every part to matter. Whether attention, masks and layers are right for an architecture does not depend
on size and weights, and a test of the small model takes milliseconds."""

import hashlib
import math
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn

from birl import kernels
from birl.cache import cache_folder
from birl.models import attention
from birl.models.load import keep_angles, model_class, quiet

WINDOW = 8  # upper bound of a sliding window or a chunk of attention [tokens]
TOKENS = 512
INNER = 256
POSITIONS = 64


def shrunk(config: Any) -> Any:
    """A copy of a config with few layers, at least one of each kind, also of those that share others' keys."""
    config = deepcopy(config)
    text = config.get_text_config()
    before, shared = text.num_hidden_layers, getattr(text, "num_kv_shared_layers", None) or 0  # the last ones
    by_layer = {n: v for n, v in vars(text).items() if isinstance(v, list | tuple) and len(v) == before}
    built, places = layers(config, before), [*range(before)]
    said = [v for v in by_layer.values() if list(v) != places]  # Llama 4 lists its layers that have experts
    kinds = [(*built[i : i + 1], *(repr(v[i]) for v in said)) for i in places]

    def least(kinds: list[Any]) -> int:
        return min(len(kinds), max([2, *(kinds.index(kind) + 1 for kind in set(kinds))]))

    own = before - shared
    kept = [*range(least(kinds[:own])), *range(own, own + least(kinds[own:]))]
    text.num_hidden_layers = len(kept)
    if shared:
        text.num_kv_shared_layers = least(kinds[own:])
    for name, value in by_layer.items():
        setattr(text, name, type(value)(value[i] for i in kept))
    text.vocab_size = min(text.vocab_size, TOKENS)
    if getattr(text, "pad_token_id", None) is not None:
        text.pad_token_id = 0
    for width in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        if each := getattr(text, width, None):
            less = [min(n, INNER) for n in each] if isinstance(each, list | tuple) else min(each, INNER)
            setattr(text, width, less)
    for name, value in list(vars(text).items()):
        window = ("window" in name and name != "max_window_layers") or name.startswith("attention_chunk")
        if window and isinstance(value, int) and not isinstance(value, bool) and value > WINDOW:
            setattr(text, name, WINDOW)
    if 0 < getattr(text, "max_position_embeddings", POSITIONS) < POSITIONS:
        text.max_position_embeddings = POSITIONS
    return config


def layers(config: Any, count: int) -> list[str]:
    """Module class names in each of a config's layers: some configs define layer kinds by periods and first layers, not
    by lists (Jamba, RecurrentGemma, DeepSeek-V3). Empty if no module list has `count` entries."""
    with quiet(), torch.device("meta"):
        model = model_class(config).from_config(deepcopy(config), dtype=torch.float32, trust_remote_code=False)
    lists = (m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count)
    return [" ".join(type(m).__name__ for m in layer.modules()) for layer in next(lists, ())]


def twin(config: Any, sees: bool = False) -> nn.Module:
    """`sees`: with the vision tower, if the text model alone has a class of its own. Raises what transformers raises
    for a config that cannot be shrunk."""
    options: Any = {"dtype": torch.float32, "trust_remote_code": False}
    with quiet(), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        small = shrunk(config)
        how = attention.named(small)
        model = cast(Any, model_class(small, sees).from_config(small, attn_implementation=how, **options))
        # an initialisation of 0.02 would hide errors behind zeros; matrices without rows: no shared experts
        for parameter in filter(Tensor.numel, model.parameters()):
            wide = 1 / math.sqrt(parameter.shape[-1])
            if parameter.ndim >= 2 and float(parameter.std()) < wide:
                parameter.normal_(0, wide)
            elif parameter.ndim == 1 and float(parameter.abs().max()) < wide:  # biases and sinks begin as zeros
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    keep_angles(model)
    return model.eval()


def proved(model: nn.Module, device: torch.device, dtype: torch.dtype = torch.float32) -> Path:
    """The file that records that this twin passed its comparison on this kind of device, in float32 and in `dtype`,
    with these versions."""
    birl = hashlib.sha256()
    folders = (Path(__file__).parent, Path(kernels.__file__).parent)
    for file in sorted(file for folder in folders for file in folder.iterdir() if file.suffix in (".py", ".c", ".h")):
        birl.update(file.read_bytes())
    versions = (transformers.__version__, torch.__version__, birl.hexdigest(), kernels.problem())
    identity = repr((type(model).__name__, cast(Any, model).config.to_json_string(), str(device), versions, str(dtype)))
    return cache_folder("proofs") / hashlib.sha256(identity.encode()).hexdigest()[:32]
