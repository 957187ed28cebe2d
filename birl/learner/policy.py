"""A model that can be sampled from: `birl rl`, `eval` and `chat` all begin with one."""

from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from birl.config import schema
from birl.config.keys import written
from birl.errors import BirlError
from birl.learner.export import resolved
from birl.models.device import choose
from birl.models.load import check_vocabulary, context_limit, end_ids, load_model, load_tokenizer, skeleton
from birl.models.shape import Shape
from birl.models.slices import quantize, sketched
from birl.models.verify import prove, verify
from birl.models.vision import give, load_pictures, sees
from birl.parallel.machine import free_memory
from birl.parallel.ranks import Ranks
from birl.text.chat import PROBE, Chat
from birl.text.pictures import Bounds
from birl.types import PICTURES

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(slots=True, kw_only=True)
class Policy:
    """A model that can be sampled from, and the thread it computes on."""

    folder: Path
    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    chat: Chat
    compute: Executor

    @property
    def context(self) -> int:
        return context_limit(self.model)

    def keep_pictures(self, run: Path) -> None:
        """Also store the files of pictures in the run's folder from now on."""
        if self.chat.pictures is not None:
            self.chat.pictures.keep(run / PICTURES)

    @property
    def pair_cost(self) -> float:
        """Cost of attention to one token, relative to a token's products with weights."""
        return Shape.of_model(self.model).pair_cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Tokenizer and limits of a model that runs elsewhere."""

    folder: Path
    chat: Chat
    context: int


def load_reader(config: schema.Model) -> Reader:
    """A model's tokenizer and limits, without its weights."""
    folder = resolved(config.path, weights=False)
    chat = Chat(load_tokenizer(folder, config.chat_template), config.tool_format)
    model = skeleton(folder, pictures=config.pictures)
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(folder)  # pyright: ignore
    chat.end_ids = end_ids(model, chat.tokenizer)
    see(config, folder, model, chat)
    return Reader(folder=folder, chat=chat, context=context_limit(model))


def load_policy(config: schema.Model, compute: Executor, ranks: Ranks | None = None, quantized: str = "none") -> Policy:
    """Load and verify a model: in float32 on the device that it will run on, so with that device's kernels, and a small
    model of the same kind in the run's type. If it is sharded over `ranks`, it gets no weights yet (`models/slices.py`)
    and only the small one is verified. `quantized`: nf4 or int8; it is quantised while loading, weight by weight."""
    device = choose(config.device)
    folder = resolved(config.path)
    if quantized != "none" and sees(folder, config.pictures):
        raise BirlError(
            f"model.path={config.path}: has a vision tower, for which lora.quantize={quantized} is not built. Set "
            "model.pictures=false where its text alone has a class, or lora.quantize=none."
        )
    tokenizer = load_tokenizer(folder, config.chat_template)
    chat = Chat(tokenizer, config.tool_format)
    if config.chat_template:
        try:
            chat.render(PROBE[:1])
        except BirlError as error:
            raise BirlError(f"model.chat_template={config.chat_template}: {error}") from error
    if ranks is not None and ranks.sharded:
        model = sketched(folder, device, pictures=config.pictures)
        if ranks.rank == 0:
            prove(model.config, device, type(model), DTYPES[config.dtype])
    else:
        if quantized == "none":
            check_room(config.path, folder, device, config.pictures)
            model = load_model(folder, pictures=config.pictures).to(device)
        else:
            model = quantize(sketched(folder, device), quantized)
        verify(model, DTYPES[config.dtype])
    check_vocabulary(model, tokenizer)
    chat.end_ids = end_ids(model, tokenizer)
    see(config, folder, model, chat)
    return Policy(folder=folder, model=model, tokenizer=tokenizer, chat=chat, compute=compute)


def see(config: schema.Model, folder: Path, model: nn.Module, chat: Chat) -> None:
    """Set up loading of pictures in the model and its chat. Raises `BirlError`."""
    bounds = Bounds(
        pixels=config.max_pixels,
        megabytes=config.max_picture_mb,
        count=config.max_pictures,
        hosts=tuple(config.picture_hosts),
    )
    chat.pictures = load_pictures(folder, model, chat.tokenizer, bounds)
    give(model, chat.pictures, frozen=config.freeze_vision)
    usual = schema.Model()
    for key in schema.SIGHT if chat.pictures is None else ():
        if (value := getattr(config, key)) != getattr(usual, key):
            raise BirlError(
                f"model.{key}={written(value)}: has no effect because {type(model).__name__} sees no pictures: it has "
                "no vision tower that birl knows (docs/pictures.md), or its folder no image processor. Remove the key."
            )


def check_room(path: str, folder: Path, device: torch.device, pictures: bool = False) -> None:
    """Raises `BirlError` if a GPU cannot hold the weights in float32, in which they are loaded and verified."""
    if device.type == "cpu":
        return
    needed, free = 4 * sum(p.numel() for p in skeleton(folder, pictures=pictures).parameters()), free_memory(device)
    if needed > free:
        raise BirlError(
            f"model.path={path}: is loaded in float32, which takes {needed / 2**30:.1f} GiB, and {device} has "
            f"{free / 2**30:.1f} GiB free. Take a smaller model, or another model.device (of birl chat: device)."
        )
