"""Pictures in the forward pass: the vision tower's features replace the embeddings of placeholder tokens.

    row       ids of a packed row, with placeholders (`text/pictures.py`) -> ids of the vocabulary, positions, `Seen`
    Features  of one picture: a row for each placeholder, and rows that are added after the first layers (DeepStack,
              arXiv:2406.04334)
    Seen      the features of all placeholders of a row, and their places

The tower computes each picture once for all sequences of a row that have it; its gradient is the sum of theirs. The
language model gets embeddings; its own vision code, which finds placeholders by their id in the vocabulary, would take
a placeholder that the model itself has sampled for a picture.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, PreTrainedTokenizerBase
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from birl.data.trees import Tree, nodes
from birl.errors import BirlError, first_line
from birl.models.attention import Mutual
from birl.models.load import model_class, quiet
from birl.parallel.layout import computed_in
from birl.text.pictures import FIRST, Bounds, Pictures, Processed, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """`language`: the attribute of the model's body that is the language model. `axes`: a placeholder's position has
    three parts, time, height and width (M-RoPE, arXiv:2409.12191). `mutual`: tokens of a picture attend to each other,
    also to later ones, in "every" layer or in "windowed" ones."""

    language: str = "language_model"
    axes: bool = False
    mutual: str = ""


# names of modules in any family
ATTENTION = {"self_attn", "attn", "attention", "linear_attn", "mixer"}
#: by model type
FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), Family(axes=True)),
    **dict.fromkeys(("mistral3", "internvl", "lfm2_vl"), Family()),
    "smolvlm": Family(language="text_model"),
    "gemma3": Family(mutual="every"),
    **dict.fromkeys(("gemma4", "gemma4_unified"), Family(mutual="windowed")),
}


@dataclass(frozen=True, slots=True)
class Features:
    """Features of one picture or several: rows [P, H], and rows to add after each of the first layers, [P, H] each."""

    rows: Tensor
    deep: tuple[Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + sum(each.nbytes for each in self.deep)

    def __getitem__(self, places: Tensor | slice) -> "Features":
        return Features(self.rows[places], tuple(each[places] for each in self.deep))

    @classmethod
    def joined(cls, parts: Sequence["Features"]) -> "Features":
        rows = torch.cat([part.rows for part in parts])
        return cls(rows, tuple(torch.cat(each) for each in zip(*(part.deep for part in parts), strict=True)))


@dataclass(frozen=True, slots=True)
class Seen:
    """The features at `places` [P] of a row, and which of its tokens attend to later ones."""

    places: Tensor
    features: Features
    mutual: Mutual | None = None

    def among(self, own: Tensor, count: int) -> "Seen":
        """The subset at the places `own` [t] of a row of `count` tokens."""
        place = torch.full((count,), -1, dtype=torch.int64, device=own.device)
        place[own] = torch.arange(len(own), device=own.device)
        places = place[self.places]
        return Seen(places[places >= 0], self.features[places >= 0])


def family_of(model: nn.Module) -> Family | None:
    """Return the model's family; None for a model without a vision tower."""
    body: Any = cast(Any, model).base_model
    return FAMILIES.get(cast(Any, model).config.model_type) if hasattr(body, "get_image_features") else None


def language_model(model: nn.Module) -> nn.Module | None:
    """Language model of a model with a vision tower; else None."""
    family = family_of(model)
    return None if family is None else getattr(cast(Any, model).base_model, family.language)


def mutual(model: nn.Module, places: Iterable[Sequence[int]]) -> Mutual | None:
    """The blocks of rows that attend to each other; `places`: those of each picture in a row. Marker tokens separate a
    picture's crops (Gemma 3's pan and scan), which are separate blocks."""
    family, config = family_of(model), cast(Any, model).config.get_text_config()
    larger = getattr(config, "use_bidirectional_attention", None) == "vision"  # Gemma 4's larger models
    if family is None or not (family.mutual == "every" or (family.mutual == "windowed" and larger)):
        return None
    return Mutual(tuple(block for own in places for block in neighbours(own)), family.mutual == "windowed")


def neighbours(places: Sequence[int]) -> list[tuple[int, int]]:
    """(first, count) of each run of consecutive places."""
    firsts = [i for i, place in enumerate(places) if not i or places[i - 1] != place - 1]
    return [(places[i], end - i) for i, end in zip(firsts, [*firsts[1:], len(places)], strict=True)]


def give(model: nn.Module, pictures: Pictures | None, frozen: bool = False) -> None:
    """Attach the pictures to the model. `frozen`: its tower is not trained."""
    cast(Any, model).pictures, cast(Any, model).frozen_tower = pictures, frozen


def still(model: nn.Module) -> set[str]:
    """Names of the frozen parameters."""
    result = set(tower(model)) if getattr(model, "frozen_tower", False) else set[str]()
    if getattr(model, "frozen_attention", False):
        result |= {name for name, _ in model.named_parameters() if not ATTENTION.isdisjoint(name.split("."))}
    return result


def pictures_of(model: nn.Module) -> Pictures | None:
    return getattr(model, "pictures", None)


def tower(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of the vision tower: all but the language model's and the head's."""
    language = language_model(model)
    if language is None:
        return {}
    own = {id(p) for p in language.parameters()} | {
        id(p) for p in cast(Any, model).get_output_embeddings().parameters()
    }
    return {name: p for name, p in model.named_parameters() if id(p) not in own}


def anchored(model: nn.Module, hidden: Tensor) -> Tensor:
    """`hidden`, with a gradient of 0 for each trained weight of the tower: ranks that shard the weights reduce the same
    gradients, whether or not their samples have pictures."""
    trained = torch.is_grad_enabled() and not still(model)
    own = [p for p in tower(model).values() if p.requires_grad] if trained else []
    return hidden + torch.stack([p.flatten()[0].to(hidden.dtype) for p in own]).sum() * 0 if own else hidden


def look(model: nn.Module, pictures: Sequence[Processed]) -> list[Features]:
    """The tower's features of each picture. Pictures whose inputs have one shape are computed together."""
    kind, device = computed_in(cast(Any, model).get_output_embeddings()), next(iter(tower(model).values())).device
    groups: dict[Any, list[int]] = {}
    for i, picture in enumerate(pictures):
        groups.setdefault((picture.count, *((n, a.shape) for n, a in picture.inputs.items())), []).append(i)
    result: dict[int, Features] = {}
    for own in groups.values():
        first = pictures[own[0]]
        inputs = {n: np.concatenate([pictures[i].inputs[n] for i in own]) for n in first.inputs}
        rows, *deep = (_rows(each).to(kind) for each in _seen(model, inputs, device))
        if len(rows) != first.count * len(own):
            raise BirlError(
                f"{type(model).__name__} makes {len(rows) // len(own)} rows of a picture for which its processor "
                f"writes {first.count} placeholders: the two do not belong together."
            )
        pieces = zip(*(each.split(first.count) for each in (rows, *deep)), strict=True)
        result |= {i: Features(rows, tuple(deep)) for i, (rows, *deep) in zip(own, pieces, strict=True)}
    return [result[i] for i in range(len(pictures))]


def _seen(model: nn.Module, inputs: dict[str, np.ndarray], device: torch.device) -> list[Any]:
    """The tower's rows, and rows to add after the first layers."""
    body: Any = cast(Any, model).base_model
    names = signature(body.get_image_features).parameters
    given = {name: _tensor(array, device) for name, array in inputs.items() if name in names}
    with torch.set_grad_enabled(torch.is_grad_enabled() and not getattr(model, "frozen_tower", False)):
        output = body.get_image_features(**given, return_dict=True)
    return [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]


def row(
    model: nn.Module, tokens: Tensor, positions: Tensor, trees: Sequence[Tree]
) -> tuple[Tensor, Tensor, Seen | None]:
    """A packed row, tokens [T] and positions [T] -> tokens of the vocabulary, positions [T] or [3, T], and the features
    of its pictures."""
    pictures = pictures_of(model)
    if (pictures is None and tokens.is_cuda) or not bool((tokens >= FIRST).any()):  # the check would sync
        return tokens, positions, None
    if pictures is None:
        raise BirlError(f"A row has a picture, and {type(model).__name__} reads text alone. Remove one of the two.")
    spans = pictures.spans(tokens.tolist())
    family = family_of(model)
    assert family is not None
    distinct = {span.picture.digest: span.picture for span in spans}
    known = dict(zip(distinct, look(model, list(distinct.values())), strict=True))
    features = Features.joined([known[span.picture.digest] for span in spans])
    places = torch.tensor([p for span in spans for p in span.places], dtype=torch.int64, device=tokens.device)
    if family.axes:
        made = tree_axes(positions.tolist(), spans, trees)
        positions = torch.from_numpy(made).to(tokens.device)
    return plain(tokens), positions, Seen(places, features, mutual(model, [span.places for span in spans]))


class Sight:
    """The pictures of one prompt of the engine, their places, and the positions [3, n] of its tokens (None: counted
    from 0). Positions of sampled tokens continue after the largest."""

    def __init__(self, model: nn.Module, prompt: Sequence[int]) -> None:
        """Raises `BirlError` for a missing picture, and for a model without a vision tower."""
        pictures, family = pictures_of(model), family_of(model)
        if pictures is None or family is None:
            raise BirlError("The prompt has a picture, and this model reads text alone.")
        self.count, self.spans = len(prompt), pictures.spans(prompt)
        self.positions = axes(self.count, self.spans) if family.axes else None
        ahead = mutual(model, [span.places for span in self.spans])
        self.blocks = () if ahead is None else ahead.blocks

    def at(self, start: int, count: int) -> np.ndarray:
        """Positions [3, count] of the tokens from `start` on."""
        assert self.positions is not None, "they are counted"
        known = self.positions[:, start : start + count]
        behind = int(self.positions.max()) + 1 + np.arange(max(start, self.count), start + count) - self.count
        return np.concatenate([known, np.broadcast_to(behind, (3, len(behind)))], axis=1)

    def whole(self, start: int, count: int) -> int:
        """Number of tokens from `start` on, about `count`, such that none attends to a later one outside of them."""
        ends = [first + n for first, n in self.blocks if first < start + count < first + n]
        return ends[0] - start if count > 0 and ends else count

    def within(self, start: int, count: int) -> list[tuple[Processed, list[int], list[int]]]:
        """Each picture in the `count` tokens from `start` on: its rows there, and their places relative to `start`."""
        result = []
        for span in self.spans:
            own = [(k, p - start) for k, p in enumerate(span.places) if start <= p < start + count]
            if own:
                result.append((span.picture, [k for k, _ in own], [p for _, p in own]))
        return result


def sight(model: nn.Module, prompt: Sequence[int]) -> Sight | None:
    """Return the pictures of a prompt; None for a prompt of text."""
    return Sight(model, prompt) if max(prompt, default=0) >= FIRST else None


def plain(tokens: Tensor) -> Tensor:
    """Replace every placeholder by 0: its embedding is not used."""
    return tokens.masked_fill(tokens >= FIRST, 0)


def embedded(model: nn.Module, tokens: Tensor, seen: Seen) -> dict[str, Any]:
    """The language model's arguments instead of ids [T]. With tensor parallelism ranks may share the rows: `seen` is
    this rank's."""
    embeddings = cast(Any, model).get_input_embeddings()(tokens[None])
    rows = seen.features.rows.to(embeddings.dtype)
    result: dict[str, Any] = {"inputs_embeds": embeddings.index_copy(1, seen.places, rows[None])}
    if seen.features.deep:
        marks = torch.zeros(embeddings.shape[:2], dtype=torch.bool, device=tokens.device)
        result["visual_pos_masks"] = marks.index_fill(1, seen.places, True)
        result["deepstack_visual_embeds"] = [each.to(embeddings.dtype) for each in seen.features.deep]
    config = cast(Any, model).config.get_text_config()
    if getattr(config, "hidden_size_per_layer_input", 0):  # Gemma 4: each layer has embeddings
        ids = tokens.index_fill(0, seen.places, config.pad_token_id)
        result["per_layer_inputs"] = cast(Any, language_model(model)).get_per_layer_inputs(ids[None])
    return result


def axes(count: int, spans: Sequence[Span], start: int = 0) -> np.ndarray:
    """Positions [3, count] of a sequence: text increments all three, a picture's placeholders have those of its grid,
    and the next token continues after its longer side. `start`: position of the first token."""
    result = np.empty((3, count), np.int64)
    place, position = 0, start
    for span in spans:
        first, (height, width) = span.places[0], span.picture.grid
        result[:, place:first] = position + np.arange(first - place)
        position += first - place
        result[:, first : first + height * width] = position + np.stack(
            [np.zeros(height * width, np.int64), np.arange(height).repeat(width), np.tile(np.arange(width), height)]
        )
        place, position = first + height * width, position + max(height, width)
    result[:, place:] = position + np.arange(count - place)
    return result


def tree_axes(positions: Sequence[int], spans: Sequence[Span], trees: Sequence[Tree]) -> np.ndarray:
    """`axes` of a packed row [3, T]; each node continues after its parent's positions."""
    result, place, left = np.empty((3, len(positions)), np.int64), 0, list(spans)

    def piece(size: int, start: int) -> int:
        nonlocal place
        own = [s for s in left if place <= s.places[0] < place + size]
        moved = [Span(s.picture, tuple(p - place for p in s.places)) for s in own]
        result[:, place : place + size] = axes(size, moved, start)
        end = int(result[:, place : place + size].max()) + 1 if size else start
        place += size
        return end

    ends: list[int] = []
    for node in nodes(trees):
        ends.append(piece(node.count, ends[node.parent] if node.parent >= 0 else 0))
    return result


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    kind = torch.float32 if array.dtype.kind == "f" else torch.bool if array.dtype.kind == "b" else torch.int64
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, kind)


def _rows(value: Tensor | Sequence[Tensor]) -> Tensor:
    whole = value if isinstance(value, Tensor) else torch.cat(list(value))
    return whole.reshape(-1, whole.shape[-1])


PROCESSORS = ("processor_config.json", "preprocessor_config.json")  # files of a model folder


def load_pictures(
    folder: Path, model: nn.Module, tokenizer: PreTrainedTokenizerBase, bounds: Bounds
) -> Pictures | None:
    """Return the image processing of a vision-language model, without the video and audio processors, which need
    further libraries; None if the model has no vision tower, or its folder no processor (it is then used for text
    only). Raises `BirlError`."""
    config: Any = model.config
    if family_of(model) is None or not any((folder / name).is_file() for name in PROCESSORS):
        return None
    name = PROCESSOR_MAPPING_NAMES.get(config.model_type)
    if name is None:
        raise BirlError(f"{folder}: transformers has no processor for {config.model_type}, so it cannot see pictures.")
    try:
        with quiet():
            own = AutoImageProcessor.from_pretrained(folder, trust_remote_code=False)
            processor = made(name, own, tokenizer, folder)
    except Exception as error:
        raise BirlError(
            f"{folder}: the processor of its pictures cannot be loaded: {first_line(error)} Pictures need what "
            "`pip install 'birl[pictures]'` installs."
        ) from error
    return Pictures(processor, tokenizer, bounds)


def made(name: str, image_processor: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> Any:
    import transformers

    kind: Any = getattr(transformers, name)
    seeing = type(name, (kind,), {"check_argument_for_proper_class": lambda *_: None})  # None in place of other parts
    parts = {"image_processor": image_processor, "tokenizer": tokenizer}
    options, _ = kind.get_processor_dict(folder)
    return seeing.from_args_and_dict([parts.get(part) for part in kind.get_attributes()], options)


def sees(folder: Path, pictures: bool) -> bool:
    """Whether a folder's model is loaded with a vision tower."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception:  # loading the model reports the error
        return False
    return "vision_config" in config.sub_configs and model_class(config, pictures) is AutoModelForImageTextToText
