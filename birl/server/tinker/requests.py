"""Typed requests, parsed from JSON or protobuf once on arrival, and checked there.

Example: forward_backward(body, Reader(vocabulary=49152, context=8192)).data[0].tokens
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from birl.errors import BirlError
from birl.server.tinker import wire
from birl.server.tinker.inputs import Reader
from birl.text.pictures import is_picture
from birl.types import Picture, SamplingParams

MOST_TARGETS = 256  # targets per position: top-k distillation takes 20 or so
MOST_SAMPLES = 1024
MOST_CELLS = 50_000_000  # cells of top log-prob tables in one answer: 8 bytes each
BYTES = 64  # bytes of a training request, or of a prompt's images, that count as one token


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """A training example. `tokens` [T] int64; `inputs`: arrays, [T] or [T, K]; `pictures` among the tokens."""

    tokens: np.ndarray
    inputs: dict[str, np.ndarray]
    pictures: tuple[Picture, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def targets(self) -> np.ndarray:
        """Targets [T, K] int64."""
        targets = self.inputs["target_tokens"]
        return targets[:, None] if targets.ndim == 1 else targets


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackward:
    data: list[Datum]
    loss: str
    config: dict[str, float | str]
    forward_only: bool

    @property
    def tokens(self) -> int:
        return sum(map(len, self.data))


@dataclass(frozen=True, slots=True)
class Address:
    """Run and number of a protobuf request, and its tokens; available even if the rest of it is invalid."""

    model: str
    seq: int
    tokens: int


def address(body: bytes) -> Address:
    """Read the address. Raises `BirlError` if the body is no such message."""
    model, seq, tokens, room = "", 0, 0, wire.Room()
    for number, value in wire.fields(body, room):
        if number == 1:
            model = wire.text(value)
        elif number == 2:
            seq = wire.signed(value)
        elif number == 3:
            for kind, chunk in wire.fields(wire.raw(value), room):
                parts = dict(wire.fields(wire.raw(chunk), room)) if kind == 1 else {}
                text = dict(wire.fields(wire.raw(parts.get(1, b"")), room))
                tokens += len(wire.raw(text.get(1, b""))) // 4
    return Address(model, seq, tokens)


def forward_backward(body: bytes, reader: Reader) -> ForwardBackward:
    """Parse a request. Raises `BirlError` that names the datum, the field and the problem."""
    data: list[bytes] = []
    loss, forward_only, old, new, room = "", False, {}, {}, wire.Room()
    for number, value in wire.fields(body, room):
        if number == 3:
            data.append(wire.raw(value))
        elif number == 4:
            loss = wire.text(value, 100)
        elif number == 5:
            key, entry = _entry(value, room)
            old[key] = wire.double(entry)
        elif number == 6:
            forward_only = bool(value)
        elif number == 7:
            key, entry = _entry(value, room)
            new[key] = _config_value(wire.raw(entry), room)
    if not data:
        raise BirlError("The request has no data.")
    read = [_datum(d, f"data[{i}]", reader, room) for i, d in enumerate(data)]
    return ForwardBackward(data=read, loss=loss, config=new or old, forward_only=forward_only)


def _entry(value: wire.Value, room: wire.Room) -> tuple[str, wire.Value]:
    """Key and value of a map entry."""
    parts = dict(wire.fields(wire.raw(value), room))
    return wire.text(parts.get(1, b""), 200), parts.get(2, b"")


def _config_value(value: bytes, room: wire.Room) -> float | str:
    for number, part in wire.fields(value, room):
        return wire.double(part) if number == 1 else wire.text(part, 1000)
    return 0.0


def _datum(body: bytes, what: str, reader: Reader, room: wire.Room) -> Datum:
    chunks: list[wire.Value] = []
    inputs: dict[str, np.ndarray] = {}
    sparse = set[str]()
    for number, value in wire.fields(body, room):
        if number == 1:
            chunks.append(value)
        elif number == 2:
            name, entry = _entry(value, room)
            left = room.dense
            inputs[name] = wire.tensor(wire.raw(entry), f"{what}.{name}", room)
            sparse |= {name} if room.dense < left else set()
    if "target_tokens" in sparse and "weights" not in inputs:  # mostly zeros: the client sends [T, K] sparse
        raise BirlError(
            f"{what}: target_tokens are sparse, where an empty cell may be token 0 or nothing: send weights of their "
            "shape, with 0 where there is no target."
        )
    row = reader.of_wire(chunks, f"{what}.model_input", room)
    return checked(Datum(tokens=row.tokens, inputs=inputs, pictures=tuple(row.pictures)), what, reader)


def checked(datum: Datum, what: str, reader: Reader) -> Datum:
    """Check a datum. Raises `BirlError` if no pass can be made of it, or a number is not finite."""
    count = len(datum)
    if not count:
        raise BirlError(f"{what}: has 0 tokens; a sequence has 1 to {reader.context}.")
    if "target_tokens" not in datum.inputs:
        raise BirlError(f"{what}: target_tokens is missing.")
    for name, values in datum.inputs.items():
        if values.ndim not in (1, 2) or len(values) != count:
            raise BirlError(f"{what}.{name}: has the shape {list(values.shape)}; the input has {count} tokens.")
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise BirlError(f"{what}.{name}: {int((~np.isfinite(values)).sum())} numbers are infinite or NaN.")
    targets = datum.targets
    if targets.dtype.kind != "i" or not 0 < targets.shape[1] <= MOST_TARGETS:
        raise BirlError(f"{what}.target_tokens: must be 1 to {MOST_TARGETS} whole numbers for each token.")
    reader.within(targets, f"{what}.target_tokens")
    return datum


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A sampling request: prompt, number of answers and sampling parameters; and for the prompt log-probs of its last
    tokens (`scored_from`: first position that counts), `top` most likely ones, `targets` [len(prompt) - 1, K] with -1
    for none, `alternatives` to sample at each position."""

    prompt: tuple[int, ...]
    count: int
    params: SamplingParams
    scored_from: int | None = None
    top: int = 0
    top_sampled: int = 0
    targets: np.ndarray | None = None
    alternatives: int = 0
    pictures: tuple[Picture, ...] = ()

    @property
    def tokens(self) -> int:
        """Maximum tokens to compute, with the share of its images."""
        files = sum(len(p.data) for p in self.pictures)
        return len(self.prompt) + self.count * self.params.max_tokens + files // BYTES

    @property
    def asks(self) -> bool:
        """Whether log-probs of the prompt are requested."""
        return self.scored_from is not None or self.targets is not None or self.alternatives > 0

    @property
    def shown(self) -> np.ndarray:
        """Positions of image tokens [T] bool."""
        return np.array([is_picture(t) for t in self.prompt], bool)


def sample(data: Mapping[str, Any], reader: Reader) -> Sample:
    """Parse an `asample` body. Raises `BirlError`."""
    vocabulary, context = reader.vocabulary, reader.context
    row = reader.of_json(mapping(data.get("prompt"), "prompt").get("chunks"), "prompt")
    prompt = tuple(row.tokens.tolist())
    count = whole(data, "num_samples", 1, 1, MOST_SAMPLES)
    if not 0 < len(prompt) < context:
        raise BirlError(
            f"prompt: has {len(prompt)} tokens; this model's context holds 1 to {context - 1}, and an answer."
        )
    last = data.get("prompt_logprobs_last_n")
    scored = None
    if data.get("prompt_logprobs") or whole(data, "topk_prompt_logprobs", 0, 0, 1000):
        scored = (
            1 if last is None else len(prompt) - whole(data, "prompt_logprobs_last_n", 1, 1, max(len(prompt) - 1, 1))
        )
    k = whole(data, "topk_prompt_logprobs", 0, 0, min(1000, vocabulary))
    result = Sample(
        prompt=prompt,
        count=count,
        params=_params(mapping(data.get("sampling_params"), "sampling_params"), vocabulary, context - len(prompt)),
        scored_from=scored,
        top=k,
        top_sampled=whole(data, "topk_sample_logprobs", 0, 0, min(1000, vocabulary)),
        targets=_targets(data.get("target_prompt_logprobs"), len(prompt) - 1, vocabulary),
        alternatives=whole(data, "prompt_alt_tokens_k", 0, 0, 256),
        pictures=tuple(row.pictures),
    )
    cells = len(prompt) * (result.top + result.alternatives) + count * result.params.max_tokens * result.top_sampled
    if cells > MOST_CELLS:
        raise BirlError(
            f"topk_prompt_logprobs, prompt_alt_tokens_k and topk_sample_logprobs ask for {cells:,} tokens; an answer "
            f"has at most {MOST_CELLS:,}: ask for fewer, for fewer samples, or set a lower max_tokens."
        )
    if result.params.temperature and not 0.001 <= result.params.temperature <= 1000:
        raise BirlError(f"temperature: must be 0, or 0.001 to 1000, not {result.params.temperature}.")
    return result


def _params(data: Mapping[str, Any], vocabulary: int, room: int) -> SamplingParams:
    """Sampling parameters. `stop`: None for the model's end tokens; [] for none; texts or ids in addition to them."""
    stop = data.get("stop")
    stop = [stop] if isinstance(stop, str) else stop
    if stop is not None and not isinstance(stop, list):
        raise BirlError("stop: must be a text, or a list of texts or of token ids.")
    texts = tuple(s for s in stop or () if isinstance(s, str))
    ids = tuple(s for s in stop or () if type(s) is int)
    right = len(texts) + len(ids) == len(stop or ()) <= 256
    if not right or not all(texts) or any(len(t) > 4096 for t in texts) or not all(0 <= i < vocabulary for i in ids):
        raise BirlError("stop: must be at most 256 texts of 1 to 4096 characters, or token ids of the model.")
    most, k = data.get("max_tokens"), whole(data, "top_k", -1, -1, 2**31 - 1)
    return SamplingParams(
        max_tokens=min(whole(data, "max_tokens", 1, 1, 2**31 - 1), room) if most is not None else room,
        temperature=real(data, "temperature", 1.0, 0.0, 1000.0),
        top_p=real(data, "top_p", 1.0, 1e-9, 1.0),
        top_k=max(k, 0),
        seed=whole(data, "seed", 0, -(2**63), 2**64 - 1) % 2**64 if data.get("seed") is not None else None,
        stop=texts,
        stop_ids=ids,
        ignore_eos=stop == [],
    )


def _targets(data: Any, rows: int, vocabulary: int) -> np.ndarray | None:
    if data is None:
        return None
    data, what = mapping(data, "target_prompt_logprobs"), "target_prompt_logprobs"
    values, shape = data.get("data"), data.get("shape")
    lists = [values, shape, data.get("sparse_crow_indices") or [], data.get("sparse_col_indices") or []]
    good = (isinstance(x, list) and all(type(n) is int and -(2**63) <= n < 2**63 for n in x) for x in lists)
    if not all(good) or len(shape or ()) != 2:
        raise BirlError(f"{what}: must be an int64 tensor of two dimensions.")
    numbers, shape, crow, columns = (np.array(x, dtype=np.int64) for x in lists)
    size = tuple(shape.tolist())
    if size[0] != rows or not 0 < size[1] <= MOST_TARGETS:
        raise BirlError(f"{what}: the shape {list(size)} is not [{rows}, 1 to {MOST_TARGETS}].")
    sparse = data.get("sparse_crow_indices") is not None
    result = wire.spread(numbers, crow, columns, size, what, -1) if sparse else wire.shaped(numbers, size, what)
    if (result >= vocabulary).any() or (result < -1).any() or (rows and (result < 0).all()):
        raise BirlError(f"{what}: must name tokens of the model, or -1 for none, and at least one.")
    return result


def mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise BirlError(f"{what} must be an object.")
    return value


def whole(data: Mapping[str, Any], key: str, default: int, least: int, most: int) -> int:
    """An integer in a range. Raises `BirlError`."""
    value = data.get(key)
    if value is None:
        return default
    if type(value) is not int or not least <= value <= most:
        raise BirlError(f"{key}: must be a whole number from {least} to {most}, not {str(value)[:50]}.")
    return value


def real(data: Mapping[str, Any], key: str, default: float, least: float, most: float) -> float:
    value = data.get(key)
    if value is None:
        return default
    if type(value) not in (int, float) or not least <= value <= most:  # NaN is in no range
        raise BirlError(f"{key}: must be a number from {least:g} to {most:g}, not {str(value)[:50]}.")
    return float(value)


def words(data: Mapping[str, Any], key: str, default: str = "", most: int = 1000) -> str:
    value = data.get(key)
    if value is None:
        return default
    if not isinstance(value, str) or len(value) > most:
        raise BirlError(f"{key}: must be a text of at most {most} characters.")
    return value


def flag(data: Mapping[str, Any], key: str, default: bool) -> bool:
    value = data.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BirlError(f"{key}: must be true or false.")
    return value


def metadata(data: Mapping[str, Any], key: str = "user_metadata") -> dict[str, str]:
    """At most 64 entries, as texts. Raises `BirlError`."""
    value = data.get(key) or {}
    if not isinstance(value, Mapping) or len(value) > 64:
        raise BirlError(f"{key}: must be an object of at most 64 entries.")
    result = {str(k)[:200]: v if isinstance(v, str) else str(v) for k, v in value.items()}
    if any(len(v) > 10_000 for v in result.values()):
        raise BirlError(f"{key}: a value is longer than 10,000 characters.")
    return result
