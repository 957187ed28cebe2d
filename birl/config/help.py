"""The pages of `birl rl --help`: common keys on one screen, all keys (`--help all`), or keys that match a word."""

import inspect
import re
import textwrap
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from birl.config import peers
from birl.config.keys import DEFAULT_PRESETS, Doc, documentation, presets, written

WIDE = 120  # least columns for a key and its text on one line

EXAMPLES = {
    "rl": """\
birl rl data.train=my.jsonl                                  # SmolLM2, Dr. GRPO, math reward
birl rl data.train=my.jsonl reward=my_file.py:score          # your own reward function
birl rl data.train=my.jsonl algorithm=grpo optimizer.lr=1e-5
birl rl data.train=[a.jsonl,b.parquet] data.weights=[2,1] model=/path/to/model
birl rl env=countdown --help                                 # the keys of an environment
birl rl recipes/smollm2_arithmetic_grpo_cpu2.yaml seed=1     # a YAML file, then overrides
birl rl data.train=my.jsonl --dry-run                        # load one batch, predict the memory, exit
birl rl data.train=my.jsonl optimizer.lr=1e-6,1e-5 seed='range(0,3)' --multirun""",
    "sft": """\
birl sft data.train=my.jsonl                          # rows: {"prompt": ..., "response": ...}
birl sft data.train=chats.jsonl model=/path/to/model  # rows: {"messages": [...]}
birl sft data.train=my.jsonl data.validation_split=0.1 optimizer.lr=1e-5 epochs=3
birl sft data.train=books.jsonl data.train_on=[all]   # rows: {"text": ...}""",
    "rm": """\
birl rm data.train=pairs.jsonl                               # rows: {"prompt": ..., "chosen": ..., "rejected": ...}
birl rm data.train=pairs.jsonl data.margin_column=margin ranking.centering=0.01
birl rl data.train=my.jsonl reward=model reward.model=FOLDER # next: the exported model as reward""",
    "dpo": """\
birl dpo data.train=pairs.jsonl                              # rows: {"prompt": ..., "chosen": ..., "rejected": ...}
birl dpo data.train=pairs.jsonl preference.loss=simpo preference.beta=2 preference.margin=0.5
birl dpo data.train=pairs.jsonl preference.reference=precomputed
birl dpo data.train=votes.jsonl preference.loss=kto data.chosen_column=answer data.label_column=good""",
    "eval": """\
birl eval data.validation=test.jsonl                         # SmolLM2-135M, greedy
birl eval data.validation=test.jsonl model=/path/to/model
birl eval data.validation=test.jsonl validation.samples=8 validation.k=[1,8] validation.temperature=1
birl eval env=countdown                                      # a built-in task (docs/tasks.md)
birl eval --validate data.validation=test.jsonl              # without a model: do reference answers get reward 1?
birl eval --judge data.validation=judged.jsonl reward.judge=http://localhost:8000/v1#m  # agreement with people""",
    "serve": """\
birl serve                                                   # SmolLM2-135M on a free local port
birl serve model=/path/to/model port=8000
birl serve port=8000 host=0.0.0.0                            # open to other machines: needs BIRL_TOKEN
birl serve name=arithmetic/0                                 # registered under this name""",
    "tinker": """\
birl tinker                                                  # SmolLM2-135M at http://127.0.0.1:8000, one tenant
birl tinker model=/path/to/model names=[Qwen/Qwen3-8B]       # under the model name that clients use
birl tinker keys=tenants.txt host=0.0.0.0                    # for several tenants: one name and key per line""",
}

_TRAINING = {  # the keys on the first screen; commands show those that they have
    "run": "run steps epochs seed validation.every checkpoint.every track.wandb",
    "model and data": "model.path data.train data.validation data.train_on data.chosen_column data.rejected_column",
    "task": "env.kind reward.functions",
    "sampling": "rollout.prompts rollout.group_size rollout.max_tokens rollout.temperature rollout.max_staleness",
    "training": "algorithm algorithm.kl_coef preference.loss preference.beta ranking.centering batch_size optimizer.lr "
    "optimizer.schedule optimizer.warmup_steps lora.rank learner.tokens_per_microbatch",
    "processes": "engine.kind parallel.fsdp",
}
EVERYDAY = dict.fromkeys(("rl", "sft", "rm", "dpo"), _TRAINING) | {
    "eval": {
        "model and data": "model.path model.max_length data.validation data.max_validation_samples data.system_prompt",
        "task": "env.kind env.max_turns reward.functions reward.judge",
        "sampling": "validation.samples validation.k validation.temperature validation.max_tokens seed",
        "engine": "engine.kind engine.attach engine.max_batch threads",
        "result": "output",
    },
    "serve": {
        "model": "model.path served_name model.dtype model.device model.max_length model.chat_template",
        "server": "host port name volume",
        "engine": "engine.max_batch engine.kv_cache_gb threads seed",
        "limits": "max_waiting max_request_mb request_timeout drain_timeout",
    },
    "tinker": {
        "model": "model.path names model.dtype model.device model.max_length",
        "server": "folder host port keys",
        "computing": "tokens_per_pass engines max_batch kv_cache_gb adapters_gb threads parallel.ddp parallel.fsdp",
        "limits": "quota_runs quota_tokens quota_gb max_request_mb",
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """Keys of an environment: env.kind, and their dataclass."""

    kind: str
    section: type


def render(
    command: str,
    schema: type,
    width: int,
    only: tuple[str, ...] = (),
    bold: bool = False,
    own: Own | None = None,
    flags: tuple[str, ...] = (),
) -> str:
    """A help page of at most `width` columns: one screen of keys; with `only=("all",)` all keys and presets; else the
    keys that match these words. `own` comes last. `flags`: of the command beside --help."""
    strong = (lambda text: f"\033[1m{text}\033[0m") if bold else str
    usage = f"birl {command} [FILE.yaml] [key=value ...] {' '.join(f'[{flag}]' for flag in flags)} [--help [WORD]]"
    title = _wrap(" ".join((inspect.getdoc(schema) or "").split()), width, "")
    head = f"{title}\n\n{_wrap(usage, width, strong('Usage: '), '       ')}\n"
    examples = EXAMPLES.get(command, "")
    if only == ("all",):
        parts = [head, f"{strong('Examples')}\n{_examples(examples, width)}\n"]
        parts += [
            f"{strong('Presets')}\n{_presets(schema, width)}\n",
            f"{strong('Keys')}\n{_wrap(LISTS, width, '  ', '  ')}\n",
        ]
        parts += [_keys(list(documentation(schema).values()), width, strong)]
    elif only:
        parts = [_search(command, schema, width, only, strong)]
    else:
        first = "\n".join(examples.splitlines()[:3])
        parts = [head, f"{_examples(first, width)}\n", _everyday(command, schema, width, strong)]
        parts += [f"\n{_wrap(MORE.format(command=command, count=len(documentation(schema))), width, '')}"]
    return "\n".join([*parts, *([f"\n{_own_keys(own, width, strong)}"] if own else [])])


LISTS = "A list is [a,b]; text needs no quotes; ${other.key} copies another key's value."
MORE = (
    "`birl {command} --help all` shows all {count} keys with their full texts, `--help WORD` searches names, texts "
    "and the names that other libraries use (batch_size, num_generations)."
)


def _everyday(command: str, schema: type, width: int, strong: Any) -> str:
    """Common keys, one a line: name, default, unit, and the first sentences of the text that fit."""
    docs = documentation(schema)
    rows: list[tuple[str, str]] = []  # a title has no text
    for title, names in EVERYDAY[command].items():
        keys = [key for key in names.split() if key in docs or key in presets(schema)]
        rows += [(strong(title), ""), *(_row(docs.get(key), key, schema) for key in keys)] if keys else []
    side = 2 + max(len(left) for left, _ in rows)
    return "\n".join(f"{left:<{side}}{_brief(text, width - side)}".rstrip() for left, text in rows)


def _row(doc: Doc | None, key: str, schema: type) -> tuple[str, str]:
    if doc is None:  # a group of presets
        return f"  {key}={DEFAULT_PRESETS[key]}", f"One of {len(presets(schema)[key])} presets; --help all lists them."
    return f"  {key}={written(doc.default)}{_in_brackets(doc.unit)}", doc.text


def _brief(text: str, width: int) -> str:
    """The first sentences of `text` that fit into `width` columns, or the beginning of the first."""
    width = max(width, 16)
    sentences = re.split(r"(?<=[.;]) ", text)
    whole = [" ".join(sentences[:n]) for n in range(len(sentences), 0, -1)]
    fits = next((part for part in whole if len(part) <= width), "") or textwrap.shorten(text, width, placeholder=" ...")
    return re.sub(";$", ".", fits)


def _search(command: str, schema: type, width: int, words: tuple[str, ...], strong: Any) -> str:
    """Keys whose name contains one of the words, then those with it as another library's name, or in their text."""
    every = list(documentation(schema).values())
    named = [doc for doc in every if any(word in doc.key for word in words)]
    also = [doc for doc in every if doc not in named and any(_about(doc, word) for word in words)]
    if named:
        title = f"\n\n{strong('By another name, or in the text')}\n"
        return _keys(named, width, strong) + (title + _keys(also, width, strong) if also else "")
    none = f"No key of `birl {command}` is called {' or '.join(words)}"
    if also:
        return f"{none}; by another name, or in the text:\n\n{_keys(also, width, strong)}"
    from birl.config.nearest import suggest  # which imports this module

    hint = "".join(dict.fromkeys(suggest(word, schema) for word in words))
    return f"{none}.{hint} `birl {command} --help all` lists them all."


def _about(doc: Doc, word: str) -> bool:
    """Whether a key's text contains the word, or another library calls the key so."""
    theirs = any(doc.key in ((one,) if one else row.keys) for row, one in peers.mentioned(word))
    return theirs or re.search(rf"\b{re.escape(word)}", doc.text, re.IGNORECASE) is not None


def _examples(text: str, width: int) -> str:
    lines = []
    for line in text.splitlines():
        command, _, remark = line.partition("  #")
        command = command.rstrip()
        lines += (
            [f"  {line}"]
            if len(line) + 2 <= width
            else [*_wrap_command(command, width), *([f"      #{remark}"] if remark else [])]
        )
    return "\n".join(lines)


def _wrap_command(command: str, width: int) -> list[str]:
    lines = textwrap.wrap(command, width - 8, break_long_words=False, break_on_hyphens=False)
    return [
        ("  " if i == 0 else "      ") + line + (" \\" if i < len(lines) - 1 else "") for i, line in enumerate(lines)
    ]


def _presets(schema: type, width: int) -> str:
    known, keys = presets(schema), {doc.key for doc in documentation(schema).values()}
    texts = {
        f"{group}={name}": path.read_text(encoding="utf-8").splitlines()[0].removeprefix("#").strip()
        for group, files in known.items()
        for name, path in files.items()
    }
    if "model" in known:
        texts["model=ANY"] = "A folder, a .gguf file or a hub id: short for model.path=ANY."
    if "reward.functions" in keys:
        texts["reward=ANY"] = "Short for reward.functions=ANY."
    if "env.kind" in keys:
        texts["env=ANY"] = "Short for env.kind=ANY."
    side = 4 + max(map(len, texts), default=0)
    return "\n".join(_wrap(text, width, f"  {name}".ljust(side), " " * side) for name, text in texts.items())


def _keys(docs: list[Doc], width: int, strong: Any) -> str:
    sections = [
        f"{strong(section or 'the run')}\n{_lines(list(own), width, _columns(docs))}"
        for section, own in groupby(docs, lambda doc: doc.section)
    ]
    return "\n\n".join(sections)


def _columns(docs: list[Doc]) -> int:
    return max((len(_left(doc)) for doc in docs), default=0) + 4


def _lines(docs: list[Doc], width: int, columns: int = 0) -> str:
    """Lines of keys, one after the other."""
    lines, columns = [], columns or _columns(docs)
    for doc in docs:
        head = f"  {_left(doc)}"
        if width >= WIDE:
            lines.append(_wrap(doc.text, min(width, 200), f"{head:<{columns}}", " " * columns))
        else:
            lines += textwrap.wrap(
                head.strip(), width, initial_indent="  ", subsequent_indent="      ", break_long_words=False
            )
            lines += [_wrap(doc.text, width, " " * 6, " " * 6)] if doc.text else []
    return "\n".join(lines)


def _own_keys(own: Own, width: int, strong: Any) -> str:
    docs = [replace(doc, key=f"env.{doc.key}") for doc in documentation(own.section).values()]
    title = strong(f"env: keys of {own.kind}")
    return f"{title}\n{_lines(docs, width)}" if docs else f"{title}\n  none"


def _left(doc: Doc) -> str:
    default = written(doc.default)
    default = default if len(default) <= 24 else f"{default[:21]}..."
    return f"{doc.key}={default}  {doc.type}{_in_brackets(doc.unit)}"


def _in_brackets(unit: str) -> str:
    return f" [{unit}]" if unit else ""


def _wrap(text: str, width: int, first: str, rest: str = "") -> str:
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
