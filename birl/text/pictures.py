"""Conversion between pictures and the tokens that stand for them.

A model's image processor computes pixel values of a picture, and the text that stands for it in a prompt: placeholder
tokens, one for each row of the vision tower's output, between marks. In the vocabulary all placeholders have one id. In
birl each has its own id, above every vocabulary, derived from the picture's digest:

    FIRST + the digest's hexadecimal digits 7 k to 7 k + 6, of its k-th placeholder (k counted modulo 9)

So code that compares tokens (pages of the KV cache, trees of a group, turns of an episode) also compares pictures, and
samples, checkpoints and workers carry pictures as tokens. The files are stored here, by digest, and the model computes
their embeddings when the tokens pass through it (`models/vision.py`). SGLang's pad values are similar, with one id for
a whole picture; two ids, 56 bits of the digest, identify the file.
"""

import io
import threading
from base64 import b64encode
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from birl.errors import BirlError, first_line, placed
from birl.regular import write_whole
from birl.text.parts import png
from birl.types import Picture

FIRST = 2**30  # above every token id of a vocabulary, and below 2**31
DIGITS, ROUND = 7, 9  # hexadecimal digits of an id, and number of ids before they repeat
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
FILES = 2**30  # bytes of files cached in memory if a folder has them, too
PIXELS = 2**29  # bytes of cached pixel values


#: ids -> the files of their pictures, by digest
Files = Callable[[Sequence[int]], dict[str, bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits of pictures: decoded `pixels`, `megabytes` of the file, `count` in one conversation, and the `hosts` for
    downloads."""

    pixels: int = 2**24
    megabytes: float = 20.0
    count: int = 64
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Processed:
    """A preprocessed picture. `text` stands for it in a prompt and has `count` placeholders; `inputs`: arrays for the
    vision tower, by name; `grid`: height and width of the placeholders' grid."""

    digest: str
    text: str
    count: int
    inputs: Mapping[str, np.ndarray]
    grid: tuple[int, int]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.inputs.values())

    @property
    def ids(self) -> tuple[int, ...]:
        return placeholders(self.digest, self.count)


@dataclass(frozen=True, slots=True)
class Span:
    """A picture in a sequence of ids: positions of its placeholders, in order."""

    picture: Processed
    places: tuple[int, ...]


def placeholders(digest: str, count: int) -> tuple[int, ...]:
    own = [FIRST + int(digest[DIGITS * k : DIGITS * (k + 1)], 16) for k in range(ROUND)]
    return tuple(own[k % ROUND] for k in range(count))


def is_picture(token: int) -> bool:
    return FIRST <= token < 2 * FIRST


class Pictures:
    """The pictures of one model: its processor, and every picture it was given, in memory and, after `keep`, in a
    folder. Thread-safe. `deepcopy` returns the same object: copies of a model share it."""

    def __init__(self, processor: Any, tokenizer: Any, bounds: Bounds | None = None) -> None:
        self.processor, self.tokenizer, self.bounds = processor, tokenizer, bounds or Bounds()
        self.folder: Path | None = None
        self.forgets = False  # files are evicted for newer ones, even if no folder has them
        self.files: OrderedDict[str, bytes] = OrderedDict()  # by digest
        self.size = 0  # of all of them [bytes]
        self.known: defaultdict[str, list[str]] = defaultdict(list)  # digests by their first digits
        self.processed: OrderedDict[str, Processed] = OrderedDict()
        self.pixels = 0  # of all of them [bytes]
        self.given: WeakValueDictionary[str, Picture] = WeakValueDictionary()  # by digest
        self.lock, self.decoding = threading.RLock(), threading.Lock()

    def __deepcopy__(self, memo: Any) -> "Pictures":
        return self

    @cached_property
    def token(self) -> str:
        """The text that stands for a picture in the chat template's output."""
        return str(self.processor.image_token)

    @cached_property
    def id(self) -> int:
        """Id of all placeholders in the model's vocabulary."""
        return int(self.processor.image_token_ids[0])

    def keep(self, folder: Path | None) -> None:
        """Store files in this folder, too; existing ones are written to it."""
        with self.lock:
            self.folder = folder
            if folder is not None:
                for digest, data in self.files.items():
                    self._write(digest, data)

    def held(self, picture: Picture) -> Picture:
        """The shared picture with this digest; its file is not evicted while a reference to it exists."""
        with self.lock:
            return self.given.setdefault(picture.digest, picture)

    def add(self, picture: Picture) -> Processed:
        """Add a picture and preprocess it. Raises `BirlError` for an invalid picture, or one beyond the limits. It is
        decoded outside of `lock`, so that passes with other pictures continue."""
        with self.decoding:
            fresh = self.processed.get(picture.digest) or processed(
                self.processor, picture.digest, picture.data, self.bounds
            )
        with self.lock:
            result = self._process(picture.digest, picture.data, fresh)
            if picture.digest not in self.files:
                self.files[picture.digest] = picture.data
                self.size += len(picture.data)
                self._know(picture.digest)
                self._write(picture.digest, picture.data)
            self._trim()
            return result

    def encode(self, text: str, pictures: Iterator[Picture]) -> tuple[int, ...]:
        """Ids of a rendered text, in which each `token` is the next of `pictures`. Raises `BirlError`."""
        pieces = text.split(self.token)
        seen: list[Processed] = []
        for _, one in zip(pieces[1:], pictures, strict=False):
            with placed(f"Picture {len(seen) + 1}"):
                seen.append(self.add(one))
        if len(seen) < len(pieces) - 1:
            raise BirlError(
                f"A text holds {self.token}, which stands for a picture, {len(pieces) - 1 - len(seen)} times more "
                "often than there are pictures. Remove it from the text."
            )
        whole = pieces[0] + "".join(one.text + piece for one, piece in zip(seen, pieces[1:], strict=True))
        ids = self._ids(whole)
        places = [i for i, token in enumerate(ids) if token == self.id]
        own = [token for one in seen for token in one.ids]
        if len(places) != len(own):
            raise BirlError(
                f"A text holds the placeholder of pictures, {self.tokenizer.convert_ids_to_tokens(self.id)}, by "
                "itself. Remove it from the text."
            )
        for place, token in zip(places, own, strict=True):
            ids[place] = token
        return tuple(ids)

    def shown(self, ids: Sequence[int]) -> list[int]:
        """Ids of the vocabulary, for readable text: one placeholder for each run of picture tokens."""
        return [
            self.id if token >= FIRST else token
            for i, token in enumerate(ids)
            if token < FIRST or not i or ids[i - 1] < FIRST
        ]

    def folded(self, ids: Sequence[int]) -> tuple[list[int], list[str]]:
        """Ids of the vocabulary with `token` for each picture, as the chat template writes them, and the digests.
        Raises `BirlError`."""
        real, end = [self.id if is_picture(token) else token for token in ids], 0
        mark, text, digests = self._ids(self.token), [], []
        for span in self.spans(ids):
            own = self._ids(span.picture.text)
            first = span.places[0] - own.index(self.id)
            if first < end or real[first : first + len(own)] != own:
                raise BirlError(
                    f"The tokens of picture {span.picture.digest} are merged with the text beside it, so they cannot "
                    "be replaced by one: set engine.kind=embedded or birl."
                )
            text += [*real[end:first], *mark]
            end = first + len(own)
            digests.append(span.picture.digest)
        return [*text, *real[end:]], digests

    def png(self, digest: str) -> str:
        """A PNG file in base64 with the pixels that the processor is given (RGB, upright)."""
        return b64encode(png(decoded(self._data(digest), self.bounds))).decode("ascii")

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def spans(self, ids: Sequence[int]) -> list[Span]:
        """The pictures in a sequence, or in concatenated sequences, in order. Raises `BirlError` if one is missing or
        truncated."""
        places = [i for i, token in enumerate(ids) if token >= FIRST]
        result: list[Span] = []
        while places:
            first, second = (ids[p] for p in (places * 2)[:2])
            one = self._found(first, second if len(places) > 1 else None)
            own = tuple(places[: one.count])
            if tuple(ids[p] for p in own) != one.ids:
                raise BirlError(f"A sequence has only {len(own)} of the {one.count} tokens of picture {one.digest}.")
            result.append(Span(one, own))
            del places[: one.count]
        return result

    def used(self, ids: Sequence[int]) -> dict[str, bytes]:
        """The files of the pictures in a sequence, by digest."""
        return {span.picture.digest: self._data(span.picture.digest) for span in self.spans(ids)}

    def _found(self, first: int, second: int | None) -> Processed:
        """The picture whose placeholders begin with these ids."""
        prefix = f"{first - FIRST:07x}"
        whole = prefix + (f"{second - FIRST:07x}" if second is not None and second >= FIRST else "")
        with self.lock:
            for start in (whole, prefix):  # a picture may have a single placeholder
                each = (self._process(digest) for digest in self._beginning(start))
                result = [one for one in each if len(start) > DIGITS or one.count == 1]
                if len(result) > 1:
                    raise BirlError(f"Two pictures have the same token: {result[0].digest} and {result[1].digest}.")
                if result:
                    return result[0]
        where = f" ({self.folder} has no file {prefix}...)" if self.folder else ""
        raise BirlError(f"A sequence has a picture that is not there{where}: its file was never given, or removed.")

    def _beginning(self, prefix: str) -> list[str]:
        result = [digest for digest in self.known.get(prefix[:DIGITS], ()) if digest.startswith(prefix)]
        if not result and self.folder is not None and self.folder.is_dir():
            result = sorted(path.name for path in self.folder.glob(f"{prefix}*") if len(path.name) == 64)
            for digest in result:
                self._know(digest)
        return result

    def _know(self, digest: str) -> None:
        if digest not in (own := self.known[digest[:DIGITS]]):
            own.append(digest)

    def _process(self, digest: str, data: bytes | None = None, fresh: Processed | None = None) -> Processed:
        if digest in self.processed:
            self.processed.move_to_end(digest)
            return self.processed[digest]
        result = fresh or processed(self.processor, digest, data or self._data(digest), self.bounds)
        self.processed[digest] = result
        self.pixels += result.nbytes
        while len(self.processed) > 1 and self.pixels > PIXELS:
            self.pixels -= self.processed.popitem(last=False)[1].nbytes
        return result

    def _data(self, digest: str) -> bytes:
        if digest in self.files:
            self.files.move_to_end(digest)
            return self.files[digest]
        if (given := self.given.get(digest)) is not None:
            return given.data
        if self.folder is not None and (path := self.folder / digest).is_file():
            data = path.read_bytes()
            if Picture.of(data).digest == digest:
                return data
        raise BirlError(f"The file of picture {digest} is gone{f' from {self.folder}' if self.folder else ''}.")

    def _write(self, digest: str, data: bytes) -> None:
        if self.folder is None or (path := self.folder / digest).exists():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)

    def _trim(self) -> None:
        while (self.forgets or self.folder is not None) and len(self.files) > 1 and self.size > FILES:
            self.size -= len(self.files.popitem(last=False)[1])


def processed(processor: Any, digest: str, data: bytes, bounds: Bounds) -> Processed:
    """Preprocess one picture alone, so that the result does not depend on other pictures."""
    image = decoded(data, bounds)
    options = processor._merge_kwargs(tokenizer_init_kwargs=processor.tokenizer.init_kwargs, return_tensors="np")
    try:
        own, texts = processor._process_images([[image]] if nested(processor) else [image], **extra(processor, options))
    except (ValueError, ZeroDivisionError) as error:  # a shape that the model does not accept
        raise BirlError(f"A picture of {image.width} x {image.height} pixels: {first_line(error)}") from error
    inputs = {name: np.asarray(value) for name, value in own.items() if not isinstance(value, str)}
    token = processor.tokenizer.convert_ids_to_tokens(int(processor.image_token_ids[0]))
    grid = inputs.get("image_grid_thw")
    size = getattr(processor.image_processor, "merge_size", 1) if grid is not None else 1
    height, width = (0, 0) if grid is None else (int(n) // size for n in grid[0][1:])
    return Processed(
        digest=digest, text=texts[0], count=texts[0].count(token), inputs=inputs, grid=(height, width)
    )  # fmt: skip


def nested(processor: Any) -> bool:
    """Whether the processor takes a list of pictures for each text."""
    return type(processor).__name__ in ("SmolVLMProcessor", "Idefics3Processor", "Lfm2VlProcessor", "Gemma3Processor")


def extra(processor: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the processor's call that concern pictures."""
    result = dict(options["images_kwargs"])
    if type(processor).__name__ == "Lfm2VlProcessor":
        result["use_image_special_tokens"] = options.get("use_image_special_tokens", True)
    return result


def decoded(data: bytes, bounds: Bounds) -> Any:
    """Decode a file to a PIL image in RGB, upright, as transformers' `load_image`; of an animation the first frame. The
    size is read from the header and checked before any pixel is decoded. Raises `BirlError`."""
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise BirlError("Pictures need Pillow: pip install 'birl[pictures]'.") from error
    if len(data) > bounds.megabytes * 1e6:
        raise BirlError(
            f"A picture's file has {len(data) / 1e6:.1f} MB, at most {bounds.megabytes:g} are read "
            "(model.max_picture_mb)."
        )
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            pixels = image.width * image.height
            if pixels > bounds.pixels:
                raise BirlError(
                    f"A picture of {image.width} x {image.height} pixels is not decoded: at most {bounds.pixels} "
                    "pixels are (model.max_pixels)."
                )
            if image.mode.startswith(("I", "F")):  # Pillow would cut off values above 255
                raise BirlError(f"A picture has more than 8 bits a channel (mode {image.mode}). Convert it to 8 bits.")
            return ImageOps.exif_transpose(image).convert("RGB")
    except BirlError:
        raise
    except Exception as error:  # Pillow raises many types, DecompressionBombError among them
        why = "its format is unknown" if isinstance(error, UnidentifiedImageError) else first_line(error)
        raise BirlError(
            f"A picture cannot be read ({why}). It must be a whole file of {', '.join(FORMATS)}."
        ) from error
