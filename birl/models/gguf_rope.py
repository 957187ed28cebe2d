"""Scaled rotary embeddings of .gguf files: those of Llama 3 stand in a tensor of factors, which transformers passes
over, so that its model would be another one."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from birl.errors import BirlError

FACTORS = "rope_freqs.weight"  # [D / 2] float32: what each frequency is divided by
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}  # of all models that Meta released
ORIGINAL = 8192  # tokens that Llama 3 was trained with at first, where a file does not say


def factors(config: Any) -> Tensor:
    """Of a configuration whose rope_type is llama3, as the embedding of transformers has them."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    powers = torch.arange(0, size, 2, dtype=torch.float32) / size
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))  # pyright: ignore
    return 1.0 / config.rope_parameters["rope_theta"] ** powers / scaled


def restore(source: Path, config: Any) -> None:
    """What a file says of its rotary embedding, into what transformers made of the file. Raises `BirlError` for a
    scaling that is not read."""
    from gguf import GGUFReader

    reader = GGUFReader(source)
    told = {name.partition(".")[2]: field.contents() for name, field in reader.fields.items() if ".rope.scal" in name}
    names = [t.name for t in reader.tensors if t.name.startswith(("rope_freqs", "rope_factors"))]
    kind = told.get("rope.scaling.type", "none")
    if names == [FACTORS] and kind == "none":
        given = torch.from_numpy(next(t.data for t in reader.tensors if t.name == FACTORS).copy()).float()
        original = int(told.get("rope.scaling.original_context_length", ORIGINAL))
        known = {"factor": float(given.max()), "original_max_position_embeddings": original}
        config.rope_parameters = config.rope_parameters | LLAMA3 | known
        if torch.allclose(factors(config), given, rtol=1e-4, atol=0):
            return
    elif not names and (kind == "none" or config.model_type == "gpt_oss"):  # which transformers reads
        return
    raise BirlError(
        f"{source}: its rotary embedding is scaled ({names[0] if names else kind}) in a way that is not read from "
        ".gguf files. Name the folder or hub id of the model that it was made of."
    )
