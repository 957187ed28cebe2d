import json
from math import isnan
from pathlib import Path

import pytest

from birl.errors import BirlError
from birl.track.log import encode
from birl.view import episodes as module
from birl.view.episodes import BITS, Episodes
from tests.view.made import record, write

LONG = "Forty characters are the least that is looked at, so here they are. "


def indexed(path: Path) -> Episodes:
    found = Episodes(path)
    assert found.read_on()
    return found


def test_each_row_says_what_its_line_says(tmp_path: Path) -> None:
    rows = [
        record(step=3, group=7, episode=1, said=12, reward=0.25, score=1.0, outcome="truncated"),
        record(step=4, reward=None, score=None, advantage=None, outcome="env_error", samples=[], text=""),
        record(step=5, turns=[{"agent": "", "reward": 0.0, "text": "a"}] * 3, text='"samples":[ is only said, "x,"'),
    ]
    found = indexed(write(tmp_path / "rollouts.jsonl", rows))
    first, failed, last = found.rows
    assert [first[n].item() for n in ("step", "group", "episode", "tokens", "prompt")] == [3, 7, 1, 12, 3]
    assert (first["reward"], first["score"], module.OUTCOMES[first["outcome"]]) == (0.25, 1.0, "truncated")
    assert isnan(failed["reward"]) and isnan(failed["advantage"]) and failed["tokens"] == 0
    assert last["turns"] == 3 and last["tokens"] == 5
    for n, row in enumerate(rows):
        assert found.record(n) == json.loads(encode(row))
        assert found.head(n) == {k: v for k, v in json.loads(encode(row)).items() if k != "samples"}
    assert list(found.tasks) == ["train.jsonl:7", "train.jsonl:0"] and list(found.sources) == ["arithmetic"]


def test_lines_that_another_program_wrote_are_read_too(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps(record(said=9)) + "\n" + json.dumps({"step": 2}) + "\n")
    found = indexed(path)
    assert found.rows["tokens"].tolist() == [9, 0] and found.rows["step"].tolist() == [1, 2]
    assert found.head(0)["text"] == record()["text"] and isnan(found.rows["reward"][1])


def test_what_is_added_later_is_read_on_and_half_a_line_waits(tmp_path: Path) -> None:
    path = write(tmp_path / "rollouts.jsonl", [record(step=1), record(step=2)])
    found = indexed(path)
    line = encode(record(step=3, text="später 🙂"))
    with path.open("ab") as file:
        file.write(line[:100])
        file.flush()
        assert found.read_on() and found.count == 2
        file.write(line[100:])
        file.flush()
        assert found.read_on() and found.count == 3
    assert found.head(2)["text"] == "später 🙂" and found.begun == 0


def test_a_file_that_was_cut_back_loses_those_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "rollouts.jsonl", [record(step=s) for s in range(1, 6)])
    found = indexed(path)
    size = sum(len(encode(record(step=s))) for s in range(1, 4))
    with path.open("r+b") as file:
        file.truncate(size)
    assert found.read_on() and found.rows["step"].tolist() == [1, 2, 3] and found.begun == 1
    write(path, [record(step=4, reward=0.0)], "ab")
    assert found.read_on() and found.rows["reward"].tolist() == [1.0, 1.0, 1.0, 0.0]


def test_a_file_that_was_cut_back_and_has_grown_again_is_read_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "rollouts.jsonl", [record(step=s) for s in range(1, 6)])
    found = indexed(path)
    write(path, [record(step=s, text="another") for s in range(1, 9)])
    assert found.read_on() and found.count == 8 and found.begun == 1
    assert all(found.head(n)["text"] == "another" for n in range(8))


@pytest.mark.parametrize(
    "line",
    [
        *(b"not json", b"[1]", b'"text"', b"{}", b'{"step":"one"}', b'{"step":1,"group":99999999999}', b"\xff\xfe"),
        *(b"", b"null", b'{"step":1,"samples":[{"mask":[1,2}]}', b"[" * 100_000, b'{"step":1,"turns":3}'),
    ],
)
def test_a_broken_line_is_counted_named_and_passed_over(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(encode(record(step=1)) + line + b"\n" + encode(record(step=2)))
    found = indexed(path)
    assert found.rows["step"].tolist() == [1, 2] and found.skipped == 1
    assert list(found.broken) == [2] and found.broken[2].startswith(("not JSON (", "it is no ", "it has no step"))


def test_a_broken_line_is_named_rightly_after_the_file_was_cut_back(tmp_path: Path) -> None:
    path = write(tmp_path / "rollouts.jsonl", [record(step=1)])
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"{broken\n" + encode(record(step=2)))
    found = indexed(path)
    with path.open("r+b") as file:
        file.truncate(size)
    assert found.read_on() and (found.count, found.skipped, found.broken) == (1, 0, {})
    with path.open("ab") as file:
        file.write(encode(record(step=2)) + b"{again\n")
    assert found.read_on() and list(found.broken) == [3] and found.skipped == 1


def test_reading_can_stop_and_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 2000)
    path = write(tmp_path / "rollouts.jsonl", [record(step=1, group=n, text=LONG * (n % 40)) for n in range(200)])
    found, looks = Episodes(path), 1
    while not found.read_on(0):
        looks += 1
    assert found.count == 200 and looks > 10
    assert [found.head(n)["group"] for n in range(200)] == list(range(200))


def test_a_missing_file_says_what_writes_it(tmp_path: Path) -> None:
    with pytest.raises(BirlError, match=r"rollouts.jsonl: No such file.*track.rollouts=false"):
        Episodes(tmp_path / "rollouts.jsonl").read_on()


def test_a_row_that_is_not_there_is_named(tmp_path: Path) -> None:
    found = indexed(write(tmp_path / "rollouts.jsonl", [record()]))
    for row in (-1, 1):
        with pytest.raises(BirlError, match=f"no row {row}; there are 1"):
            found.head(row)


def flagged(found: Episodes, name: str) -> list[int]:
    return [n for n, bits in enumerate(found.rows["flags"]) if bits & BITS[name]]


def test_a_length_is_compared_with_earlier_steps_only(tmp_path: Path) -> None:
    usual = [record(step=s, group=n, said=60 + n % 5) for s in (1, 2) for n in range(50)]
    jump = [record(step=3, group=n, said=70) for n in range(30)] + [record(step=3, group=30, said=500)]
    early = [record(step=1, group=99, said=900)]
    found = indexed(write(tmp_path / "rollouts.jsonl", [*early, *usual, *jump]))
    assert flagged(found, "length") == [131]
    (reason,) = [why for name, why in found.reasons(131, found.head(131)) if name == "length"]
    assert reason == "500 tokens, where 95 of 100 earlier answers had at most 64"


def test_a_length_is_compared_with_earlier_steps_however_large_its_own_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WINDOW", 64)
    rows = [record(step=1, group=n, said=60) for n in range(70)] + [
        record(step=2, group=n, said=300) for n in range(700)
    ]
    found = indexed(write(tmp_path / "rollouts.jsonl", rows))
    assert found.usual(769) == 60 and len(flagged(found, "length")) == 700


def test_the_same_answer_twice_in_a_group_is_flagged_also_over_two_readings(tmp_path: Path) -> None:
    first = [record(group=1, episode=e, text=LONG + str(e)) for e in range(3)]
    path = write(tmp_path / "rollouts.jsonl", [record(group=0, episode=0, text=LONG + "0"), *first])
    found = indexed(path)
    assert flagged(found, "duplicate") == []
    write(path, [record(group=1, episode=3, text=LONG.upper() + "  1")], "ab")
    found.read_on()
    assert flagged(found, "duplicate") == [2, 4]
    assert ("duplicate", "2 of 4 answers of its group are the same") in found.reasons(4, found.head(4))


def test_reasons_and_bits_say_the_same(tmp_path: Path) -> None:
    texts = ["ha " * 40, r"\boxed{} and \boxed{3}", LONG, "Ответ семь, ответ семь and some more words of another", "7"]
    found = indexed(write(tmp_path / "rollouts.jsonl", [record(group=n, text=t) for n, t in enumerate(texts)]))
    for n in range(len(texts)):
        names = {name for name, _ in found.reasons(n, found.head(n))}
        assert names == {name for name, bit in BITS.items() if found.rows["flags"][n] & bit}
    assert flagged(found, "repetition") == [0] and flagged(found, "unbacked") == [0, 1, 2, 3]


def test_what_is_right_is_what_pass_at_k_counts(tmp_path: Path) -> None:
    """0 and 1 without a threshold; with other scores only validation.threshold tells, from the run's configuration."""
    scores = [1.0, 0.0, None, 1.0, 7.0, 9.5]
    path = tmp_path / "rollouts.jsonl"
    lines = [record(group=n, text="I do not know", score=s, reward=s) for n, s in enumerate(scores)]
    assert flagged(indexed(write(path, lines[:4])), "unbacked") == [0, 3]
    found = indexed(path)
    write(path, lines[4:], "ab")
    found.read_on()
    assert flagged(found, "unbacked") == [] and found.reasons(0, found.head(0)) == []
    write(path, lines[:1], "ab")
    found.read_on()
    assert flagged(found, "unbacked") == []
    (tmp_path / "config.json").write_text('{"validation": {"threshold": 8}}')
    found = indexed(path)
    assert flagged(found, "unbacked") == [5]
    assert found.reasons(5, found.head(5)) == [("unbacked", "score 9.5, but the answer “7” is not in the text")]
