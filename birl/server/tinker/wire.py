"""Protocol buffers without generated code, for the few messages of Tinker's client that are not JSON.

A message is a sequence of fields, each a number, a kind and a value: 0 a varint, 1 eight bytes, 2 a length and as many
bytes, 5 four bytes (https://protobuf.dev/programming-guides/encoding). Input is untrusted: every length is compared
with the available bytes before it is used, and nothing is allocated for announced sizes.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from birl.errors import BirlError

FLOAT32, INT64, INT32 = 1, 2, 3  # types of the Tensor message
LONGEST_SHAPE = 40  # bytes
TYPES = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8"), INT32: np.dtype("<i4")}
MOST_FIELDS = 2_000_000  # maximum fields of a request, in all its messages
MOST_DENSE = 50_000_000  # maximum numbers of a request's sparse tensors, made dense

Value = int | bytes


@dataclass(slots=True)
class Room:
    """Remaining bounds of one request: a small body can have many fields, or announce large tensors."""

    fields: int = MOST_FIELDS
    dense: int = MOST_DENSE


def fields(data: bytes, room: Room | None = None) -> Iterator[tuple[int, Value]]:
    """Number and value of each field of a message. Raises `BirlError` if it is malformed, or exceeds `room`."""
    place, room = 0, room or Room()
    while place < len(data):
        room.fields -= 1
        if room.fields < 0:
            raise BirlError(f"The request has more than {MOST_FIELDS:,} fields: send fewer data in each.")
        key, place = varint(data, place)
        kind = key & 7
        if kind == 0:
            value, place = varint(data, place)
            yield key >> 3, value
            continue
        size = {1: 8, 5: 4}.get(kind)
        if kind == 2:
            size, place = varint(data, place)
        if size is None or size > len(data) - place:
            raise BirlError("The body is no message of this kind: a field is longer than what is there.")
        yield key >> 3, data[place : place + size]
        place += size


def varint(data: bytes, place: int) -> tuple[int, int]:
    """The number at a position, and the next position."""
    result = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            break
        byte = data[place]
        place += 1
        result |= (byte & 127) << shift
        if byte < 128:
            return result, place
    raise BirlError("The body is no message of this kind: a number does not end.")


def signed(value: Value) -> int:
    """A varint as a signed number."""
    if not isinstance(value, int):
        raise BirlError("The body is no message of this kind: a number is expected.")
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def text(value: Value, most: int = 10_000) -> str:
    if not isinstance(value, bytes) or len(value) > most:
        raise BirlError("The body is no message of this kind: a text is expected, or it is too long.")
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise BirlError("The body has a text that is no UTF-8.") from None


def raw(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise BirlError("The body is no message of this kind: bytes are expected.")
    return value


def double(value: Value) -> float:
    return float(struct.unpack("<d", raw(value))[0]) if len(raw(value)) == 8 else float("nan")


def array(value: Value, dtype: np.dtype, what: str) -> np.ndarray:
    """An array of packed numbers."""
    data = raw(value)
    if len(data) % dtype.itemsize:
        raise BirlError(f"{what}: {len(data)} bytes are no row of numbers of {dtype.itemsize} bytes.")
    return np.frombuffer(data, dtype)


def numbers(value: Value) -> list[int]:
    """Numbers of a repeated field, packed or not."""
    if isinstance(value, int):
        return [signed(value)]
    if len(value) > LONGEST_SHAPE:
        raise BirlError("The body is no message of this kind: a tensor has at most 3 dimensions.")
    result, place = [], 0
    while place < len(value):
        number, place = varint(value, place)
        result.append(signed(number))
    return result


def tensor(data: bytes, what: str, room: Room | None = None) -> np.ndarray:
    """Parse a Tensor message; sparse ones become dense, with zeros. Raises `BirlError` if its shape is wrong."""
    dense, sparse, kind, shape, room = b"", None, 0, [], room or Room()
    for number, value in fields(data, room):
        if number == 1:
            dense = raw(value)
        elif number == 2:
            sparse = {n: raw(v) for n, v in fields(raw(value), room)}
        elif number == 3:
            kind = signed(value)
        elif number == 4:
            shape += numbers(value)
    if kind not in TYPES:
        raise BirlError(f"{what}: the type {kind} is none that a client sends (float32, int64, int32).")
    if any(n < 0 for n in shape) or len(shape) > 3:
        raise BirlError(f"{what}: the shape {shape[:5]} cannot be.")
    if sparse is not None:
        return compressed(sparse, TYPES[kind], shape, what, room)
    values = array(dense, TYPES[kind], what)
    return shaped(values, shape, what)


def shaped(values: np.ndarray, shape: Sequence[int], what: str) -> np.ndarray:
    """Reshape; without a shape to one dimension."""
    size = 1
    for n in shape:
        size *= n
    if shape and size != values.size:
        raise BirlError(f"{what}: the shape {list(shape)} has {size} numbers, and {values.size} were sent.")
    return values.reshape(shape) if shape else values


def compressed(
    parts: Mapping[int, bytes], dtype: np.dtype, shape: Sequence[int], what: str, room: Room | None = None
) -> np.ndarray:
    """A dense tensor of a sparse row matrix (CSR): values, row offsets, and columns."""
    index = np.dtype("<i8")
    values = array(parts.get(1, b""), dtype, what)
    rows, columns = array(parts.get(2, b""), index, what), array(parts.get(3, b""), index, what)
    room = room or Room()
    if len(shape) == 2:
        room.dense -= shape[0] * shape[1]
        if room.dense < 0:
            raise BirlError(f"{what}: the sparse tensors of the request have more than {MOST_DENSE:,} places.")
    return spread(values, rows, columns, shape, what)


def spread(
    values: np.ndarray, rows: np.ndarray, columns: np.ndarray, shape: Sequence[int], what: str, fill: float = 0
) -> np.ndarray:
    if len(shape) != 2 or shape[0] * shape[1] > MOST_DENSE:
        raise BirlError(
            f"{what}: a sparse tensor has two dimensions and at most {MOST_DENSE} places, not {list(shape)}."
        )
    right = (
        len(rows) == shape[0] + 1
        and len(columns) == len(values)
        and rows[0] == 0
        and rows[-1] == len(values)
        and bool((np.diff(rows) >= 0).all())
        and bool(((columns >= 0) & (columns < shape[1])).all())
    )
    if not right:
        raise BirlError(f"{what}: the indices of the sparse tensor do not fit its shape {list(shape)}.")
    result = np.full(shape, fill, values.dtype)
    result[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return result


def number_field(number: int, value: int) -> bytes:
    return encoded(number << 3) + encoded(value & (2**64 - 1))


def bytes_field(number: int, value: bytes) -> bytes:
    return encoded(number << 3 | 2) + encoded(len(value)) + value


def double_field(number: int, value: float) -> bytes:
    return encoded(number << 3 | 1) + struct.pack("<d", value)


def encoded(value: int) -> bytes:
    """Encode a varint."""
    result = bytearray()
    while value >= 128:
        result.append(value & 127 | 128)
        value >>= 7
    result.append(value)
    return bytes(result)


def tensor_field(number: int, values: np.ndarray) -> bytes:
    """A dense Tensor message."""
    kind = INT64 if values.dtype.kind == "i" else FLOAT32
    shape = b"".join(encoded(n) for n in values.shape)
    body = bytes_field(1, values.astype(TYPES[kind]).tobytes()) + number_field(3, kind) + bytes_field(4, shape)
    return bytes_field(number, body)
