"""One episode for the page: its tokens with all their figures, in the order of its turns; and its group."""

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from birl.errors import BirlError
from birl.text import calls
from birl.types import PICTURES, ToolCall
from birl.view import flags
from birl.view.episodes import Episodes, number
from birl.view.tokens import Vocabulary
from birl.visible import visible

# Message headers of chat templates; the first regex group is the role.
HEADERS = re.compile(
    r"<\|im_start\|>([A-Za-z_]{1,20})\n?"
    r"|<\|start_header_id\|>([A-Za-z_]{1,20})<\|end_header_id\|>\n*"
    r"|<start_of_turn>([A-Za-z_]{1,20})\n?"
    r"|<\|start\|>([A-Za-z_]{1,20})[^<]{0,80}(?:<\|channel\|>[^<]{0,40})?<\|message\|>"
    r"|<\|(system|user|assistant|tool|observation)\|>\n?"
    r"|(\[INST\])|(\[TOOL_RESULTS\])|(<｜User｜>)|(<｜Assistant｜>)|(<｜tool▁outputs▁begin｜>)"
)
ROLES = {
    **{"[INST]": "user", "[TOOL_RESULTS]": "tool", "<｜User｜>": "user", "<｜Assistant｜>": "assistant"},
    **{"<｜tool▁outputs▁begin｜>": "tool", "model": "assistant", "ipython": "tool", "function": "tool"},
    **{"observation": "tool", "developer": "system"},
}
TOOL_ANSWER = ("<tool_response>", "<function_results>")
READERS = (
    *(("<｜tool▁calls▁begin｜>", calls.deepseek), ("[TOOL_CALLS]", calls.mistral), ("<|python_tag|>", calls.llama)),
    *(
        ("<|tool_call>", calls.gemma4),
        ("<start_function_call>", calls.function_gemma),
        ("<function=", calls.qwen_coder),
        ("<tool_call>", calls.hermes),
    ),
)
PER_TOKEN = ("logprobs", "versions")  # values of every token
PER_TRAINED = ("advantages", "gaps", "entropies")  # values of generated tokens
ALIKE = 0.5  # similarity below which texts are shown as different as a whole
WORDS = 800  # longest answer that is compared word by word
KEPT = 4096  # cached texts; the answers of a group share a prompt
LARGEST = 2**26  # largest file of a picture [bytes]


def trajectory(episodes: Episodes, vocabulary: Vocabulary, row: int) -> dict[str, Any]:
    """The whole episode of a row. Raises `BirlError` if it does not exist, or its lists differ in length."""
    record = episodes.record(row)
    try:
        samples = [sample(s, vocabulary, row) for s in record.get("samples") or ()]
        turns = [t for t in record.get("turns") or () if isinstance(t, Mapping)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BirlError(f"Row {row}: it cannot be shown ({type(error).__name__}: {error}).") from error
    return {
        **summary(episodes, row, record),
        "detail": visible(str(record.get("detail") or "")),
        "rewards": figures(record.get("rewards")),
        "turns": [{"agent": visible(str(t.get("agent") or "")), "reward": t.get("reward")} for t in turns],
        "samples": samples,
        "known": vocabulary.known,
        "text": "" if samples else visible(str(record.get("text") or "")),
        "pictures": len(pictures(record)),
    }


def summary(episodes: Episodes, row: int, head: Mapping[str, Any]) -> dict[str, Any]:
    """Summary of a row, for the list, the group and the page of one episode."""
    known = episodes.rows[row]
    names = ("step", "group", "episode", "turns", "tokens", "prompt", "reward", "score", "advantage")
    return {
        "row": row,
        **{name: known[name].item() for name in names},
        "task": visible(str(head.get("task") or "")),
        "source": visible(str(head.get("source") or "")),
        "answer": None if head.get("answer") is None else visible(str(head.get("answer"))),
        "outcome": visible(str(head.get("outcome") or "unknown")),
        "parts": figures(head.get("parts")),
        "flags": [{"name": name, "reason": visible(reason)} for name, reason in episodes.reasons(row, head)],
    }


def figures(named: Any) -> dict[str, float]:
    """Parts of a reward, or rewards of agents, by name; NaN if not a number."""
    return {visible(str(name)): number(value) for name, value in named.items()} if isinstance(named, Mapping) else {}


def sample(record: Mapping[str, Any], vocabulary: Vocabulary, row: int) -> dict[str, Any]:
    """One list of tokens with their values, null if unknown, and its blocks."""
    tokens, mask = list(record["tokens"]), [bool(m) for m in record["mask"]]
    _fits("mask", mask, len(tokens), row)
    result: dict[str, Any] = {"ids": tokens, "mask": [int(m) for m in mask]}
    result["shown"] = vocabulary.shown(tokens)
    result["special"] = [n for n, token in enumerate(tokens) if vocabulary.special(token)]
    for name in PER_TOKEN:
        values = list(record.get(name) or ())
        if values:
            _fits(name, values, len(tokens), row)
            result[name] = [value if m else None for value, m in zip(values, mask, strict=True)]
    for name in PER_TRAINED:
        values = record.get(name)
        if values is None:
            continue
        each = list(values) if isinstance(values, list) else [values] * sum(mask)
        _fits(name, each, sum(mask), row)
        given = iter(each)
        result[name] = [next(given) if m else None for m in mask]
    result["blocks"] = list(blocks(tokens, mask, vocabulary))
    return result


def _fits(name: str, values: Sequence[Any], wanted: int, row: int) -> None:
    if len(values) != wanted:
        raise BirlError(f"Row {row}: {name} has {len(values)} values for {wanted} tokens, so it cannot be shown.")


def blocks(tokens: Sequence[int], mask: Sequence[bool], vocabulary: Vocabulary) -> Iterator[dict[str, Any]]:
    """The messages: start and end [tokens], role, start of the content after the header, and tool calls. A header
    counts only if the model did not write it."""
    data = [vocabulary.bytes_of(token).decode("utf-8", "replace") for token in tokens]
    starts = dict[int, tuple[str, int]]()  # first token of a block -> role, first token after the header
    edges = [n for n in range(len(mask)) if n == 0 or mask[n] != mask[n - 1]]
    for start, end in zip(edges, [*edges[1:], len(mask)], strict=True):
        if mask[start]:
            headers = {body - 1 for role, body in starts.values() if role == "assistant"}  # last tokens of each
            if start - 1 not in headers:  # what the model writes after one belongs to its block
                starts[start] = ("assistant", start)
            continue
        own = _headers(data, start, end)
        if not own and start == 0:
            own = {0: ("prompt", 0)}
        elif not own and not "".join(data[start:end]).strip():
            continue  # what a template puts after an answer, such as a line break
        elif not own:
            own = {start: ("environment", start)}
        elif start == 0:
            own.setdefault(0, ("prompt", 0))
        starts |= own
    order = sorted(starts)
    for n, start in enumerate(order):
        end = order[n + 1] if n + 1 < len(order) else len(tokens)
        role, body = starts[start]
        words = "".join(data[body:end])
        if role == "user" and any(mark in words[:80] for mark in TOOL_ANSWER):
            role = "tool"
        model = any(mask[start:end])
        made = called(words) if role == "assistant" else ()
        yield {
            "role": role,
            "model": model,
            "start": start,
            "body": min(body, end),
            "end": end,
            "calls": [{"name": visible(c.name), "arguments": visible(c.arguments)} for c in made],
        }


def _headers(data: Sequence[str], start: int, end: int) -> dict[int, tuple[str, int]]:
    """Blocks that begin between two tokens."""
    text, places = "", list[int]()  # of each character its token
    for n in range(start, end):
        text += data[n]
        places += [n] * len(data[n])
    result = {}
    for header in HEADERS.finditer(text):
        name = next(filter(None, header.groups()))
        body = places[header.end()] if header.end() < len(places) else end
        result[places[header.start()]] = (ROLES.get(name, name.lower()), max(body, places[header.end() - 1] + 1))
    return result


def called(text: str) -> tuple[ToolCall, ...]:
    """Tool calls in a text, in the first known format that matches."""
    words = flags.plain(text)
    for mark, read in READERS:
        if mark in words:
            return read(words, ())[1]
    return ()


def group(episodes: Episodes, row: int) -> dict[str, Any]:
    """All episodes of the row's group, the best reward first, each with its differences from the first."""
    members = episodes.group(row)
    heads = {n: episodes.head(n) for n in members}
    rewards = episodes.rows["reward"]
    order = sorted(members, key=lambda n: math.inf if math.isnan(rewards[n]) else -rewards[n])
    texts = {n: visible(flags.plain(str(heads[n].get("text") or ""))) for n in members}
    best = texts[order[0]] if order else ""
    return {
        "row": row,
        "episodes": [
            {
                **summary(episodes, n, heads[n]),
                "detail": visible(str(heads[n].get("detail") or "")),
                "text": [[True, best]] if n == order[0] else differences(best, texts[n]),
            }
            for n in order
        ],
    }


def differences(best: str, text: str) -> list[list[Any]]:
    """The text in pieces, each with whether `best` has it, too. In texts of more than 800 words only the common
    beginning and end are found."""
    a, b = (re.findall(r"\s+|\w+|[^\w\s]", t) for t in (best, text))
    front = _same(a, b)
    back = min(_same(a[::-1], b[::-1]), len(a) - front, len(b) - front)
    middle = b[front : len(b) - back]
    result = [[True, "".join(b[:front])]]
    if len(a) > WORDS or len(b) > WORDS:
        result.append([False, "".join(middle)])
    else:
        matcher = difflib.SequenceMatcher(None, a[front : len(a) - back], middle, autojunk=False)
        alike = matcher.ratio() >= ALIKE
        pieces = matcher.get_opcodes() if alike else [("replace", 0, 0, 0, len(middle))]
        result += [[kind == "equal", "".join(middle[start:end])] for kind, _, _, start, end in pieces]
    result.append([True, "".join(b[len(b) - back :])])
    return [piece for piece in result if piece[1]]


def _same(a: Sequence[str], b: Sequence[str]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def pictures(record: Mapping[str, Any]) -> list[Any]:
    named = record.get("pictures")
    return named if isinstance(named, list) else []


def picture(folder: Path, record: Mapping[str, Any], number: int) -> Path:
    """File of a screenshot, or of a picture in a prompt. Raises `BirlError` if there is none, or if it is outside of
    the run folder: rollouts.jsonl may be untrusted, and must not give access to other files of this machine."""
    named = pictures(record)
    if not 0 <= number < len(named):
        raise BirlError(f"There is no picture {number}; there are {len(named)}, counted from 0.")
    root = folder.resolve()
    path = (root / str(named[number])).resolve()
    kept = path.parent == root / PICTURES and len(path.name) == 64
    if not path.is_relative_to(root) or not (kept or path.suffix == ".png"):
        raise BirlError(f"{named[number]} is no picture inside the run folder, so it is not shown.")
    if not path.is_file():
        raise BirlError(f"{path.relative_to(root)} is gone; it was a picture of this episode.")
    if path.stat().st_size > LARGEST:
        raise BirlError(f"{path.relative_to(root)} has more than {LARGEST // 2**20} MiB, so it is not shown.")
    return path


class Prompts:
    """The prompts of a run's episodes.

    Example: Prompts(episodes, Vocabulary(run / "model")).text(0) == "What is 3 + 4?"
    """

    def __init__(self, episodes: Episodes, vocabulary: Vocabulary) -> None:
        self.episodes, self.vocabulary = episodes, vocabulary
        self._decoded = lru_cache(KEPT)(self._decode)

    def text(self, row: int) -> str:
        """The user's messages before the first generated token; if the chat template has no known headers, all text
        before it. Empty if the run has no tokenizer. Raises `BirlError` for a row that does not exist."""
        return self._decoded(self.episodes.given(row))

    def _decode(self, tokens: tuple[int, ...]) -> str:
        try:
            if not tokens or not self.vocabulary.known:
                return ""
            result = list(blocks(tokens, [False] * len(tokens), self.vocabulary))
        except BirlError:
            return ""  # a broken tokenizer: the page of one episode reports the error
        wanted = [one for one in result if one["role"] == "user"] or [one for one in result if one["role"] != "system"]
        texts = (flags.plain(self.vocabulary.text(tokens[one["body"] : one["end"]])).strip() for one in wanted)
        return "\n".join(filter(None, texts))
