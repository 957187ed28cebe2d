"""Pictures in messages: where they come from, what is refused, and that a conversation goes on token by token."""

import base64
import io
import json
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.image_utils import load_image

from birl.config import schema
from birl.data.examples import load_examples
from birl.data.tasks import filter_by_length, load_tasks
from birl.errors import BirlError
from birl.models.load import load_tokenizer
from birl.models.vision import load_pictures
from birl.rollout.tasks import longest_prompt, prompt_tokens
from birl.text import parts, pictures
from birl.text.chat import Chat
from birl.text.parts import Finder, content
from birl.text.pictures import FIRST, Bounds, Pictures, decoded
from birl.types import PLACE, Message, Picture, ToolCall
from tests import sights
from tests.text.families import TOOLS

ONE, OTHER = Picture.of(sights.drawn("7")), Picture.of(sights.drawn("3", (16, 32)))


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    from birl.models.load import load_model

    folder = sights.folder(tmp_path_factory.mktemp("sees") / "m")
    result = Chat(load_tokenizer(folder))
    result.pictures = load_pictures(folder, load_model(folder), result.tokenizer, Bounds(count=3))
    return result


def asked(text: str, *pictures: Picture) -> Message:
    return Message(role="user", content=text, pictures=pictures)


def test_a_conversation_goes_on_token_by_token(chat: Chat) -> None:
    """A later picture is behind tokens that stay what they were, and the whole, learned from, has the same."""
    first, later = asked(f"{PLACE}Which?", ONE), asked(f"And {PLACE} this?", OTHER)
    prompt = chat.render((first,))
    reply = (*chat.encode("7"), chat.end)
    following = chat.extend(prompt, reply, (later,), (), (first,))
    assert following[: len(prompt) + len(reply)] == (*prompt, *reply)
    assert chat.shown(following) == [ONE.digest, OTHER.digest]
    said = Message(role="assistant", content="7")
    assert following == chat.render((first, said, later))
    ids, mask = chat.conversation((first, said, later, said))
    assert ids[: len(following)] == following
    assert not any(m for token, m in zip(ids, mask, strict=True) if token >= FIRST)
    assert chat.decode(prompt).count("<|image_pad|>") == 1


def test_results_of_tools_may_be_pictures(chat: Chat) -> None:
    """A template without tools gets them as one message of the user, whose second picture was lost."""
    calls = tuple(ToolCall(name="add", arguments="{}") for _ in range(2))
    said = Message(role="assistant", content="", tool_calls=calls)
    results = tuple(Message(role="tool", content=f"It: {PLACE}", pictures=(one,)) for one in (ONE, OTHER))
    plain = Message(role="tool", content="7")
    for told in (results, (plain, *results), (*results, plain, asked(f"And {PLACE}?", ONE))):
        prompt = chat.render((asked("Show it."), said, *told), TOOLS)
        assert chat.shown(prompt) == [ONE.digest, OTHER.digest, ONE.digest][: len(chat.shown(prompt))]
        assert len(chat.shown(prompt)) == sum(len(message.pictures) for message in told)


def test_what_stands_for_a_picture_is_no_text(chat: Chat) -> None:
    with pytest.raises(BirlError, match="which stands for a picture"):
        chat.render((asked("a <|image_pad|> b"),))
    with pytest.raises(BirlError, match="which stands for a picture"):
        chat.render((asked(f"a <|image_pad|> b {PLACE}", ONE),))
    with pytest.raises(ValueError, match="1 pictures for 0 places"):
        asked("a", ONE)


def test_a_model_that_reads_text_alone_says_so(chat: Chat) -> None:
    with pytest.raises(BirlError, match="this model reads text alone"):
        Chat(chat.tokenizer).render((asked(PLACE, ONE),))
    with pytest.raises(BirlError, match=r"4 pictures, at most 3 are read \(model\.max_pictures\)"):
        chat.render((asked(PLACE * 4, ONE, OTHER, ONE, OTHER),))


def test_a_template_without_a_place_for_pictures_is_refused(chat: Chat) -> None:
    other = Chat(load_tokenizer(Path(chat.tokenizer.name_or_path)))
    other.pictures = chat.pictures
    other.tokenizer.chat_template = "{% for m in messages %}{{ m['content'][0]['text'] }}{% endfor %}"
    with pytest.raises(BirlError, match="leaves out pictures"):
        other.encode_with("no place", (ONE,))


def bomb(width: int, height: int) -> bytes:
    """A PNG whose head promises so many pixels."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + head
    data = b"IDAT" + zlib.compress(b"\0" * 100)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in (chunk, data, b"IEND")
    )


def test_bombs_and_what_is_none_are_refused_before_they_are_decoded() -> None:
    for size in ((5000, 5000), (60000, 60000)):
        with pytest.raises(BirlError, match=rf"{size[0]} x {size[1]} pixels is not decoded|decompression bomb"):
            decoded(bomb(*size), Bounds())
    with pytest.raises(BirlError, match=r"0\.0 MB, at most 1e-06 are read \(model\.max_picture_mb\)"):
        decoded(ONE.data, Bounds(megabytes=1e-6))
    for data in (b"", b"hello", ONE.data[:60]):
        with pytest.raises(BirlError, match="A picture cannot be read"):
            decoded(data, Bounds())
    assert decoded(ONE.data, Bounds()).size == (24, 16)


def file(image: Any, kind: str, **options: Any) -> bytes:
    result = io.BytesIO()
    image.save(result, kind, **options)
    return result.getvalue()


def test_files_are_decoded_as_transformers_decodes_them(chat: Chat, tmp_path: Path) -> None:
    """Turned as their EXIF data says, in whatever mode; the model gets the same pixels."""
    assert chat.pictures is not None
    one = Image.open(io.BytesIO(sights.drawn("7", (24, 16), "yellow")))
    turned = []
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        turned += [file(one, kind, exif=exif) for kind in ("PNG", "JPEG", "WEBP")]
    other = [one.convert("CMYK"), one.rotate(9).convert("L")]
    files = [*turned, *(file(image, "JPEG") for image in other)]
    files += [file(one.convert(mode), "PNG") for mode in ("RGBA", "LA", "P", "1")]
    files += [file(one, "GIF", save_all=True, append_images=[one.rotate(90)]), file(one.convert("CMYK"), "TIFF")]
    files += [file(one.resize((1, 1)), "PNG"), file(one, "BMP")]
    for data in files:
        (tmp_path / "a").write_bytes(data)
        theirs = load_image(str(tmp_path / "a"))
        ours = decoded(data, Bounds())
        assert ours.size == theirs.size and ours.tobytes() == theirs.tobytes()
    (tmp_path / "a").write_bytes(turned[16])
    given = chat.pictures.processor(text=[chat.pictures.token], images=[load_image(str(tmp_path / "a"))])
    seen = chat.pictures.add(Picture.of(turned[16]))
    assert seen.grid[0] > seen.grid[1] and np.array_equal(seen.inputs["pixel_values"], given["pixel_values"])


def test_a_picture_of_16_bits_is_refused() -> None:
    """Pillow cuts its values off at 255: all white."""
    deep = Image.fromarray(np.full((4, 4), 40000, np.uint16))
    for kind in ("PNG", "TIFF"):
        with pytest.raises(BirlError, match=r"more than 8 bits a channel \(mode I;16\)\. Convert it to 8 bits"):
            decoded(file(deep, kind), Bounds())


def test_a_row_with_a_bad_picture_is_named(chat: Chat, tmp_path: Path) -> None:
    (tmp_path / "whole.png").write_bytes(ONE.data)
    (tmp_path / "cut.png").write_bytes(ONE.data[:60])
    asked = [[{"type": "image", "image": f"{name}.png"}] * 2 for name in ("whole", "cut")]
    rows = [{"prompt": [{"role": "user", "content": parts}], "response": "7"} for parts in asked]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    error = re.escape(f"{data}, row 2: Picture 1: A picture cannot be read")
    with pytest.raises(BirlError, match=error):
        load_examples(schema.Texts(train=[str(data)]), "train", chat, 512)
    (tasks,) = load_tasks(schema.Data(train=[str(data)]), "train", chat=True)
    with pytest.raises(BirlError, match=error):
        filter_by_length(tasks, lambda task: prompt_tokens(chat, task, 512), 512)
    with pytest.raises(BirlError, match=r"rows\.jsonl, row 2: Picture 1: A picture cannot be read"):
        longest_prompt([tasks[0], tasks[1]], chat, 512)


def test_pictures_fold_into_the_text_of_the_template(chat: Chat) -> None:
    assert chat.pictures is not None
    ids = chat.pictures.encode("a <|image_pad|><|image_pad|> b", iter([ONE, OTHER]))
    text, digests = chat.pictures.folded(ids)
    assert digests == [ONE.digest, OTHER.digest]
    assert text == chat.tokenizer("a <|image_pad|><|image_pad|> b", add_special_tokens=False).input_ids
    shown = Image.open(io.BytesIO(base64.b64decode(chat.pictures.png(OTHER.digest))))
    assert shown.tobytes() == decoded(OTHER.data, Bounds()).tobytes()
    assert chat.pictures.folded(ids[:1]) == ([ids[0]], [])


def test_every_way_to_give_a_picture_is_the_same_picture(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(ONE.data)
    coded = base64.b64encode(ONE.data).decode()
    url = f"data:image/png;base64,{coded}"
    ways: list[dict[str, Any]] = [
        {"type": "image", "image": "a.png"},
        {"type": "image", "image": str(tmp_path / "a.png")},
        {"type": "image", "path": "a.png"},
        {"type": "image", "image": ONE.data},
        {"type": "image", "image": {"bytes": coded, "path": None}},
        {"type": "image", "base64": coded},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": coded}},
        {"type": "image", "source": {"type": "url", "url": url}},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "input_image", "image_url": url},
        {"type": "image"},
    ]
    text, pictures = content([{"type": "text", "text": "Hi "}, *ways], Finder(folder=tmp_path), iter([ONE]))
    assert text == "Hi " + PLACE * len(ways) and {p.digest for p in pictures} == {ONE.digest}
    made = Finder().picture(Image.open(io.BytesIO(ONE.data)))
    assert Image.open(io.BytesIO(made.data)).tobytes() == Image.open(io.BytesIO(ONE.data)).tobytes()


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"image_url": {"url": "http://169.254.169.254/latest"}}, r"\[0\] is at '169\.254\.169\.254', from which"),
        ({"image_url": {"url": "/etc/passwd"}}, "names the file '/etc/passwd', which is not read here"),
        ({"image_url": {"url": "file:///etc/passwd"}}, "which is not read here"),
        ({"image_url": {"url": "data:image/png,abc"}}, "a data URL that is not base64"),
        ({"image": "!!!"}, "is no base64"),
        ({"image": 7}, "is a int, and no picture"),
        ({}, "is a picture without any of"),
    ],
)
def test_what_a_request_may_not_name_is_refused(given: dict[str, Any], error: str) -> None:
    with pytest.raises(BirlError, match=error):
        content([{"type": "image", **given}], Finder())


def test_what_is_no_address_is_told() -> None:
    with pytest.raises(BirlError, match="is no address"):
        Finder().picture("http://[::1")


def test_only_named_hosts_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "downloaded", lambda url: ONE.data)
    finder = Finder(hosts=("pictures.example",))
    assert finder.picture("https://pictures.example/a.png") == ONE
    for url in ("https://pictures.example.evil/a.png", "https://pictures.example@evil/a.png", "http://other/a.png"):
        with pytest.raises(BirlError, match="from which pictures are not downloaded"):
            finder.picture(url)


def test_files_are_found_again_by_their_tokens(chat: Chat, tmp_path: Path) -> None:
    """By another process, which has the folder alone."""
    assert chat.pictures is not None
    ids = chat.render((asked(PLACE * 2, ONE, OTHER),))
    chat.pictures.keep(tmp_path)
    other = Pictures(chat.pictures.processor, chat.tokenizer)
    with pytest.raises(BirlError, match="a picture that is not there"):
        other.spans(ids)
    other.keep(tmp_path)
    assert [s.picture.digest for s in other.spans(ids)] == [ONE.digest, OTHER.digest]
    cut = max(i for i, token in enumerate(ids) if token >= FIRST)
    with pytest.raises(BirlError, match="only"):
        other.spans(ids[:cut])
    (tmp_path / ONE.digest).write_bytes(b"other")
    with pytest.raises(BirlError, match="is gone"):
        _of(chat, tmp_path).spans(ids)


def _of(chat: Chat, folder: Path) -> Pictures:
    assert chat.pictures is not None
    result = Pictures(chat.pictures.processor, chat.tokenizer)
    result.keep(folder)
    return result


def test_pixel_values_are_held_up_to_a_bound(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chat.pictures is not None
    own = Pictures(chat.pictures.processor, chat.tokenizer)
    size = own.add(ONE).nbytes
    monkeypatch.setattr(pictures, "PIXELS", 3 * size)
    for number in range(9):
        own.add(Picture.of(sights.drawn(str(number))))
        assert own.pixels == sum(one.nbytes for one in own.processed.values()) <= 3 * size
    assert len(own.processed) == 3


def test_a_file_that_is_used_stays_when_others_need_its_room(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chat.pictures is not None
    own = Pictures(chat.pictures.processor, chat.tokenizer)
    own.forgets = True
    monkeypatch.setattr(pictures, "FILES", 1)
    monkeypatch.setattr(pictures, "PIXELS", 1)
    used = own.held(Picture.of(sights.drawn("held")))
    ids = own.add(used).ids
    lost = own.add(ONE).ids
    own.add(OTHER)
    assert list(own.files) == [OTHER.digest] and own.spans(ids)[0].picture.digest == used.digest
    with pytest.raises(BirlError, match="is gone"):
        own.spans(lost)
    del used
    own.add(OTHER)
    with pytest.raises(BirlError, match="is gone"):
        own.spans(ids)
