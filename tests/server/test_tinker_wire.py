"""What strangers send: messages that lie about their lengths, and tensors that do not fit; and what is written back."""

import numpy as np
import pytest

from birl.errors import BirlError
from birl.server.tinker import requests, wire
from birl.server.tinker.inputs import Reader
from birl.server.tinker.passes import cut
from tests.server.tinker_server import encoded, text


def tensor(body: bytes) -> np.ndarray:
    (value,) = (v for _, v in wire.fields(body))
    return wire.tensor(wire.raw(value), "x")


@pytest.mark.parametrize(
    "values", [np.arange(6).reshape(2, 3), np.array([0.5, -1.5], np.float32), np.empty(0, np.int64)]
)
def test_a_tensor_comes_back_as_it_was_written(values: np.ndarray) -> None:
    result = tensor(wire.tensor_field(3, values))
    assert result.shape == values.shape and result.dtype.kind == values.dtype.kind
    np.testing.assert_array_equal(result, values)


@pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 2**31, 2**63 - 1, -1, -(2**40)])
def test_a_number_comes_back(number: int) -> None:
    ((key, value),) = wire.fields(wire.number_field(5, number))
    assert (key, wire.signed(value)) == (5, number)


@pytest.mark.parametrize(
    "body",
    [
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f",  # 2^63 bytes are announced
        b"\x0a\x05abc",
        b"\xff" * 30,  # a number that does not end
        b"\x0b",  # a kind that is none
        b"\x09abc",
    ],
)
def test_a_message_that_lies_about_its_length_is_refused(body: bytes) -> None:
    with pytest.raises(BirlError, match="no message of this kind"):
        list(wire.fields(body))


@pytest.mark.parametrize(
    ("shape", "size"), [([2, 3], 5), ([2**40, 2**40], 4), ([-1, -6], 6), ([1, 1, 1, 6], 6)]
)  # fmt: skip
def test_a_shape_that_does_not_fit_is_refused(shape: list[int], size: int) -> None:
    body = wire.bytes_field(1, np.zeros(size, "<f4").tobytes()) + wire.number_field(3, wire.FLOAT32)
    body += b"".join(wire.number_field(4, n) for n in shape)
    with pytest.raises(BirlError, match="shape"):
        wire.tensor(body, "x")


def sparse(values: list, rows: list, columns: list, shape: list) -> np.ndarray:
    parts = {
        1: np.array(values, "<i8").tobytes(),
        2: np.array(rows, "<i8").tobytes(),
        3: np.array(columns, "<i8").tobytes(),
    }
    return wire.compressed(parts, np.dtype("<i8"), shape, "x")


def test_a_sparse_tensor_is_made_dense() -> None:
    np.testing.assert_array_equal(sparse([7, 8, 9], [0, 2, 3], [0, 2, 1], [2, 3]), [[7, 0, 8], [0, 9, 0]])


@pytest.mark.parametrize(
    ("values", "rows", "columns", "shape"),
    [
        ([7], [0, 1], [3], [1, 3]),
        ([7], [0, 1], [-1], [1, 3]),
        ([7], [0, 5], [0], [1, 3]),
        ([7, 8], [0, 2, 1, 2], [0, 1], [3, 3]),
        ([7], [0, 1], [0], [1, 10**9]),
        ([7], [0, 1], [0], [1]),
    ],
)
def test_indices_of_a_sparse_tensor_that_lead_elsewhere_are_refused(
    values: list, rows: list, columns: list, shape: list
) -> None:
    with pytest.raises(BirlError, match="sparse"):
        sparse(values, rows, columns, shape)


def test_a_request_is_read_as_it_was_sent_and_addressed_though_it_is_wrong() -> None:
    body = encoded("run", 7, [text([5, 6, 7]), text([5, 6, 7, 8])], "cross_entropy", True)
    asked = requests.forward_backward(body, Reader(320, 512))
    assert (asked.tokens, asked.loss, asked.forward_only) == (5, "cross_entropy", True)
    np.testing.assert_array_equal(asked.data[1].targets, [[6], [7], [8]])
    wrong = encoded("run", 8, [text([5, 600])], "cross_entropy", False)
    assert requests.address(wrong) == requests.Address("run", 8, 1)
    with pytest.raises(BirlError, match="600 is no token"):
        requests.forward_backward(wrong, Reader(320, 512))


def test_sparse_targets_without_weights_are_refused_as_an_empty_cell_may_be_token_0() -> None:
    """What the client sends for a torch tensor [2, 4] whose cells are mostly 0. They counted as token 0."""
    csr = {1: np.array([7, 8], "<i8"), 2: np.array([0, 1, 2], "<i8"), 3: np.array([1, 0], "<i8")}
    cells = b"".join(wire.bytes_field(n, part.tobytes()) for n, part in csr.items())
    targets = wire.bytes_field(2, cells) + wire.number_field(3, wire.INT64) + wire.bytes_field(4, b"\x02\x04")
    weights = wire.tensor_field(2, np.array([[0, 1, 0, 0], [0.5, 0, 0, 0]], np.float32))

    def body(*entries: bytes) -> bytes:
        text = wire.bytes_field(1, wire.bytes_field(1, np.array([5, 6], "<i4").tobytes()))
        one = wire.bytes_field(1, text) + b"".join(wire.bytes_field(2, entry) for entry in entries)
        return wire.bytes_field(4, b"cross_entropy") + wire.bytes_field(3, one)

    sent = wire.bytes_field(1, b"target_tokens") + wire.bytes_field(2, targets)
    with pytest.raises(BirlError, match=r"data\[0\]: target_tokens are sparse.* send weights"):
        requests.forward_backward(body(sent), Reader(320, 512))
    read = requests.forward_backward(body(sent, wire.bytes_field(1, b"weights") + weights), Reader(320, 512))
    np.testing.assert_array_equal(read.data[0].targets, [[0, 7, 0, 0], [8, 0, 0, 0]])


def test_pieces_hold_whole_data_in_order() -> None:
    assert cut([3, 4, 5, 20, 1], 8) == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5)]
    assert cut([], 8) == []


def test_small_bodies_take_no_large_room() -> None:
    """The sizes of tensors are only announced, and add up."""
    room, wide = wire.Room(dense=50), {2: np.array([0, 0], "<i8").tobytes()}
    wire.compressed(wide, np.dtype("<f4"), [1, 40], "x", room)
    with pytest.raises(BirlError, match="sparse tensors"):
        wire.compressed(wide, np.dtype("<f4"), [1, 40], "x", room)
    with pytest.raises(BirlError, match="fields"):
        list(wire.fields(b"\x08\x01" * 3, wire.Room(fields=2)))
    with pytest.raises(BirlError, match="dimensions"):
        wire.numbers(b"\x01" * 1000)
