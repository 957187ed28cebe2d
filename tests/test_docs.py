"""What the documentation says is tried: commands run, and every key, preset, file, test and metric it names exists."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

from birl.cli import main
from birl.config import schema
from birl.config.help import documentation, presets, written
from birl.config.load import SHORTHANDS, load
from birl.config.schema import DPO, RL, RM, SFT, Eval, Serve
from birl.envs.open import BUILT_IN
from birl.simulation import scenario
from tests.envs.browser.browsers import missing

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [p for p in (ROOT / "README.md", ROOT / "examples" / "README.md", *DOCS) if p.exists()]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
SCHEMAS = (RL, Eval, SFT, RM, DPO, Serve)
KEYS = {key for kind in SCHEMAS for key in documentation(kind)}
for module, name in (where.split(":") for where in BUILT_IN.values()):  # the keys of tasks that come along
    KEYS |= {f"env.{key}" for key in documentation(getattr(import_module(module), name).Config)}
SCENARIO = {f"{name}.{key}" for name in scenario.SECTIONS for key in vars(getattr(scenario.Scenario(), name))}
SECTIONS = tuple(sorted({key.partition(".")[0] for key in KEYS if "." in key}))
FOLDERS = ("birl", "tests", "docs", "recipes", "examples", "benchmarks")

#: rows of the files that the pages suppose: whatever a command reads of them is there
ROWS = [
    {"prompt": f"What is {i} + 2?", "answer": str(i + 2), "level": i, "response": f"The answer is {i + 2}."}
    | {"chosen": f"It is {i + 2}.", "rejected": "Anna", "margin": i / 2, "good": i % 2 == 0}
    for i in range(8)
]
TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
OTHER_ROWS = {  # by file name
    "chats.jsonl": [{"messages": [*TALK, {"role": "tool", "content": "7"}, TALK[1]]}] * 4,
    "code.jsonl": [{"prompt": "Write add(a, b).", "tests": ["assert add(1, 2) == 3"]}] * 4,
    "books.jsonl": [{"text": "The sum of two numbers."}] * 4,
}

# What makes a training or an evaluation small, unless the command is about that key.
SMALL = ("rollout.prompts=2", "rollout.group_size=2", "rollout.max_tokens=6", "rollout.max_failure_rate=1")
QUIET = ("track.tensorboard=false", "track.report=false", "track.console=off")
STAGES = ("sft", "rm", "dpo")
SHORT = {
    "rl": ("steps=1", *QUIET, *SMALL),
    "eval": ("validation.max_tokens=6",),
    **dict.fromkeys(STAGES, ("steps=1", "batch_size=2", *QUIET)),
}


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """(language, text) of each fenced block."""
    return ((found[1], found[2]) for found in FENCE.finditer(page.read_text(encoding="utf-8")))


def commands(text: str) -> list[list[str]]:
    """The words of each command of a shell block."""
    lines = (shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines())
    return [words for words in lines if words]


def shell_blocks() -> list:
    """Each shell block, with the scripts of its page: Python that begins with `# its_name.py`."""
    found = []
    for page in PAGES:
        python = [text for language, text in blocks(page) if language == "python"]
        scripts = {m[1]: text for text in python if (m := re.match(r"# (\w+\.py)\n", text))}
        shell = [text for language, text in blocks(page) if language in ("sh", "bash")]
        found += [pytest.param(commands(t), scripts, id=f"{page.name}-{n}") for n, t in enumerate(shell, 1)]
    return found


def jsonl(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def tables(text: str) -> dict[str, list[list[str]]]:
    """The rows of each table, by its first header cell."""
    found: dict[str, list[list[str]]] = {}
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *rows = [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in block.splitlines()]
        found[head[0]] = rows
    return found


def names(rows: list[list[str]]) -> set[str]:
    """What the first column has in backticks."""
    return {name for row in rows for name in CODE.findall(row[0])}


def spans(page: Path) -> list[str]:
    """Everything in single backticks."""
    return CODE.findall(FENCE.sub("", page.read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def demo(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run with a validation, a reference and a checkpoint."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "my.jsonl").write_text(jsonl(ROWS))
    words = [f"data.train={folder}/my.jsonl", f"data.validation={folder}/my.jsonl", "algorithm.kl_coef=0.01"]
    assert (
        main(["rl", *words, *small("rl", words, tiny), "reward=length", "validation.every=1", f"run={folder}/run"]) == 0
    )
    return folder / "run"


def small(command: str, words: list[str], tiny: Path) -> list[str]:
    """What to append so that a command takes a second: a tiny model, one step, two prompts."""
    files = [w for w in words if w.endswith(".yaml")]
    text = " ".join([*words, *(Path(f).read_text() for f in files)])
    added = [w for w in SHORT[command] if not (w == "steps=1" and "epochs=" in text)] + ["threads=1"]
    added += [] if "data.validation=" not in text and "validation:" not in text else ["data.max_validation_samples=2"]
    # a model of random weights is never right: with dynamic sampling it needs a reward that differs
    added += ["reward.functions=length", "reward.length_target=8"] if "algorithm=dapo" in text else []
    own_model = any(w.startswith("model=") and Path(w.removeprefix("model=")).is_dir() for w in words)
    return added + ([] if own_model else [f"model.path={tiny}"])


@pytest.mark.parametrize(("block", "scripts"), shell_blocks())
def test_commands_work(
    block: list[list[str]],
    scripts: dict[str, str],
    demo: Path,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if missing() and any("env=miniwob" in words for words in block):
        pytest.skip("no browser: make setup-browser")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BIRL_CACHE", str(tmp_path / "cache"))
    for name in ("recipes", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(demo, tmp_path / "runs" / "demo")
    for name, text in scripts.items():
        Path(name).write_text(text)
    for words in block:
        execute(words, tiny, monkeypatch)


def execute(words: list[str], tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *rest = words
    if program == "make":
        assert any(
            re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.MULTILINE) for target in rest
        )
    elif program.endswith("python"):
        assert (ROOT / rest[0]).is_file() or (rest[0] == "-m" and importlib.util.find_spec(rest[1])), words
    elif program == "birl":
        provide_data(rest)
        provide_models(rest, tiny)
        birl(rest, tiny, monkeypatch)
    else:
        assert program in ("tensorboard", "wandb", "pip", "git", "cd", "vllm", "curl"), f"unknown program in {words}"


def provide_data(words: list[str]) -> None:
    """Files that the page only supposes."""
    for name in re.findall(r"[\w.-]+\.(?:jsonl|csv)(?=[\],\s]|$)", " ".join(words)):
        if not Path(name).exists() and f"/{name}" not in " ".join(words):
            csv = "prompt,answer\n" + "".join(f"{row['prompt']},{row['answer']}\n" for row in ROWS)
            Path(name).write_text(csv if name.endswith(".csv") else jsonl(OTHER_ROWS.get(name, ROWS)))


def provide_models(words: list[str], tiny: Path) -> None:
    """Models that the page only supposes."""
    for key, _, value in (word.partition("=") for word in words):
        if key in ("algorithm.teacher", "critic.path") and not Path(value).exists():
            Path(value).symlink_to(tiny)


def birl(words: list[str], tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, *rest = words
    monkeypatch.setattr("builtins.input", end_of_input)
    if command in SHORT and not {"--help", "--print-config"} & set(rest):
        if needs_network(rest) or ("env=gem" in rest and sys.version_info >= (3, 12)):  # gem-llm is for 3.11
            rest = [*rest, "--print-config"]
        else:  # a job of --multirun is a process of its own: too slow to start here
            rest = [*rest, *small(command, rest, tiny), *(["--print-config"] if "--multirun" in rest else [])]
        if command != "eval" and not any(word.startswith("run=") for word in rest):
            rest.append("run=runs/here")
    elif command == "plan" and not {"--simulate", "--cluster"} & set(rest):
        rest = [*rest, f"model.path={tiny}"]
    elif command == "serve" and "--help" not in rest:  # tests/serve/test_page.py starts one
        rest = [*rest, "--print-config"]
    elif command == "chat" and not (rest and "=" not in rest[0]):
        rest = [str(tiny), *rest]
    assert main([command, *rest]) == 0, words
    shutil.rmtree("runs/here", ignore_errors=True)


def needs_network(words: list[str]) -> bool:
    """Whether the data or the model is a hub name such as openai/gsm8k."""
    places = [w.partition("=")[2] for w in words if w.startswith(("data.train=", "data.validation=", "model"))]
    values = [value for place in places for value in re.split(r"[\[\],@]", place)]
    return any(re.fullmatch(r"[\w-]+/[\w.-]+", v) and not Path(v).exists() and not Path(v).suffix for v in values)


def end_of_input(prompt: str = "") -> str:
    raise EOFError


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_are_what_they_say(page: Path) -> None:
    for language, text in blocks(page):
        if language == "python":
            compile(text, str(page), "exec")
        elif language == "jsonl":
            assert all(isinstance(json.loads(line), dict) for line in text.splitlines())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_what_is_named_exists(page: Path) -> None:
    rows = {CODE.findall(" ".join(row))[0]: row for row in preset_rows(page)}
    own = {span for row in rows.values() for span in CODE.findall(row[2])}  # keys without their section
    own |= SCENARIO if page.name == "simulate.md" else set()
    missing = [span for span in spans(page) if span not in own and problem(span)]
    assert not missing, f"{page.name} names what does not exist: {missing}"


def preset_rows(page: Path) -> list[list[str]]:
    return tables(page.read_text(encoding="utf-8").partition("## Presets")[2]).get("preset", [])


def problem(span: str) -> bool:
    """Whether this is a key, preset, file, test or function that does not exist."""
    key, equals, value = span.partition("=")
    section, dot, rest = key.partition(".")
    keys = KEYS | {"reward", "model", "algorithm"} | set(SHORTHANDS)
    if equals and key in presets(RL) and re.fullmatch(r"[a-z_0-9]+", value) and not Path(value).exists():
        return value not in presets(RL)[key]
    if (
        dot
        and section in SECTIONS
        and re.fullmatch(r"[a-z_0-9]+", rest)
        and rest not in ("py", "json", "jsonl", "yaml")
    ):
        return key not in keys
    if equals and re.fullmatch(r"[a-z_]+", key):
        return key not in keys
    path, colons, name = span.partition("::")
    if path.split("/")[0] in FOLDERS and re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", path):
        return not (ROOT / path).exists() or (bool(colons) and f"def {name}(" not in (ROOT / path).read_text())
    if re.fullmatch(r"[A-Za-z_]\w*\(\)|_Run\.\w+|[A-Z]\w+\.[a-z_]\w*", span):
        return span.removesuffix("()").rpartition(".")[2] not in defined()
    return False


@cache
def defined() -> set[str]:
    """Names of all functions and classes of the package."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "birl").rglob("*.py"))
    return set(re.findall(r"^\s*(?:async def|def|class) (\w+)", text, re.MULTILINE))


def test_the_table_of_metrics_is_what_a_run_writes(demo: Path) -> None:
    page = (ROOT / "docs" / "runs.md").read_text(encoding="utf-8").partition("## Metrics")[2].partition("\n## ")[0]
    named = {s for line in page.splitlines() if line.startswith("|") for s in CODE.findall(line.split("|")[1])}
    written: set[str] = set()
    for log in ("metrics.jsonl", "validation.jsonl"):
        record = json.loads((demo / log).read_text().splitlines()[-1])
        written |= {k for k in record if k not in (*ABOUT, "samples")}
    pattern = {name: re.sub(r"<\w+>", r"[^/]+", name) for name in named}
    assert not {w for w in written if not any(re.fullmatch(p, w) for p in pattern.values())}
    assert not {n for n, p in pattern.items() if not any(re.fullmatch(p, w) for w in written)}


Figures = dict[str, tuple[set[str], set[str]]]
ABOUT = ("step", "time", "version", "weights", "data", "seed", "n")  # of a record, beside its figures
AHEAD = "rl reward=length reward.length_target=8 rollout.max_staleness=1 engine.kind=birl"


@pytest.fixture(scope="module")
def figures(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Figures:
    """What metrics.jsonl and validation.jsonl hold, by the command that wrote them."""
    folder = tmp_path_factory.mktemp("figures")
    (folder / "my.jsonl").write_text(jsonl(ROWS))
    ppo = "algorithm=ppo algorithm.entropy_control=kl_cov algorithm.reject=divergence reward=length"
    found: Figures = {}
    for line in ("sft", "rm", "dpo", "dpo preference.loss=kto", f"rl {ppo} reward.length_target=8", AHEAD):
        command, *words = line.split()
        run = folder / str(len(found))
        words += [f"data.train={folder}/my.jsonl", f"data.validation={folder}/my.jsonl", f"run={run}"]
        assert main([command, *words, *small(command, words, tiny)]) == 0, line
        logs = [json.loads((run / f"{log}.jsonl").read_text().splitlines()[-1]) for log in ("metrics", "validation")]
        metrics, validation = ({k for k in log if k not in (*ABOUT, "samples")} for log in logs)
        found[line] = metrics, validation
    return found


def test_the_tables_of_figures_are_what_the_stages_write(figures: Figures) -> None:
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8").partition("## Metrics")[2].partition("\n## ")[0]
    told = {head.replace("`", "").removeprefix("birl "): names(rows) for head, rows in tables(page).items()}
    common = told.pop("all of them, in metrics.jsonl")
    assert set(told) == {line for line in figures if not line.startswith("rl")}
    for line, own in told.items():
        metrics, validation = figures[line]
        assert metrics == own | common, line
        assert validation == {f"validation/{name}" for name in own}, line


def test_the_table_of_figures_is_what_algorithms_add(figures: Figures, demo: Path) -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8").partition("## Figures")[2]
    plain = set(json.loads((demo / "metrics.jsonl").read_text().splitlines()[-1]))
    (metrics,) = (metrics for line, (metrics, _) in figures.items() if line.startswith("rl algorithm=ppo"))
    assert names(tables(page)["name"]) == metrics - plain


def test_the_table_of_figures_is_what_asynchronous_runs_add(figures: Figures, demo: Path) -> None:
    page = (ROOT / "docs" / "async.md").read_text(encoding="utf-8").partition("## The bound")[2]
    plain = set(json.loads((demo / "metrics.jsonl").read_text().splitlines()[-1]))
    told = names(tables(page)["metric"])
    assert figures[AHEAD][0] - plain - {"factor"} <= told <= figures[AHEAD][0] | plain


@pytest.mark.parametrize("page", DOCS, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_metrics_that_are_mentioned_exist(page: Path, demo: Path, figures: Figures) -> None:
    written = set().union(*(names for pair in figures.values() for names in pair))
    written |= {"reward/endpoint", "reward/model"}  # tests/rewards
    for log in ("metrics", "validation"):
        written |= set(json.loads((demo / f"{log}.jsonl").read_text().splitlines()[-1]))
    families = {name.split("/")[0] for name in written if "/" in name}
    for span in spans(page):
        if span.split("/")[0] in families and re.fullmatch(r"[a-z_]+(/[\w@<>]+)+", span):
            assert any(re.fullmatch(re.sub(r"<\w+>", r"[^/]+", span), name) for name in written), span


def test_the_table_of_presets_is_what_they_set() -> None:
    words = ["data.train=x", "algorithm.teacher=x"]
    loaded = {name: load(RL, [*words, f"algorithm={name}"]).algorithm for name in presets(RL)["algorithm"]}
    page = ROOT / "docs" / "algorithms.md"
    rows = {row[0].strip("`"): dict(key.split("=", 1) for key in CODE.findall(row[2])) for row in preset_rows(page)}
    assert set(rows) == set(loaded)
    default = vars(loaded["dr_grpo"])
    for name, told in rows.items():
        assert told == {k: written(v) for k, v in vars(loaded[name]).items() if v != default[k]}, name
    three = tables(page.read_text(encoding="utf-8").partition("OpenAI's recipe")[2])["key"]
    columns = ("ppo", "grpo", "dr_grpo")
    differ = {k for k in default if len({str(getattr(loaded[name], k)) for name in columns}) > 1}
    assert {row[0].strip("`").removeprefix("algorithm.") for row in three} == differ
    for key, *values in three:
        for name, value in zip(columns, values, strict=True):
            found = written(getattr(loaded[name], key.strip("`").removeprefix("algorithm.")))
            assert "not read" in value or value == found, (name, key)


def test_the_rows_of_the_page_are_read(tiny: Path) -> None:
    from birl.data.examples import load_pairs, load_texts
    from birl.models.load import load_tokenizer
    from birl.text.chat import Chat

    chat = Chat(load_tokenizer(tiny))
    texts, pairs, single = (text for language, text in blocks(ROOT / "docs" / "training.md") if language == "jsonl")
    rows = [[json.loads(line) for line in text.splitlines()] for text in (texts, pairs, single)]
    for row in rows[0]:
        assert len(load_texts(schema.Texts(train=["given"]), "train", chat, 512, given=[row])[0][0].sequences) == 1
    for row in rows[1]:
        assert len(load_pairs(schema.Pairs(train=["given"]), "train", chat, 512, given=[row])[0][0].sequences) == 2
    labelled = schema.LabelledPairs(train=["given"], chosen_column="answer", label_column="good")
    assert [e.good for e in load_pairs(labelled, "train", chat, 512, given=rows[2])[0]] == [True, False]


def test_what_a_function_may_ask_for_is_listed() -> None:
    from birl.loops import credit, objective

    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8").partition("## Your own loss")[2]
    surrogate, advantage = tables(page)[""]
    assert tuple(CODE.findall(surrogate[2])) == objective.TENSORS
    assert set(CODE.findall(advantage[2])) == set(credit.TENSORS)


def test_the_table_of_math_is_what_it_judges() -> None:
    from birl.rewards.math import math

    page = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| (`.+?`) \| (`.+?`) \|$", page.partition("## What `math`")[2], re.MULTILINE)
    assert len(rows) == 3
    for gold, *sides in rows:
        for expected, side in zip((1.0, 0.0), sides, strict=True):
            for answer in CODE.findall(side):
                assert math([answer], gold=[gold.strip("`")]) == [expected], (gold, answer)


def test_the_keys_that_may_change_are_listed() -> None:
    from birl.loops.run_folder import FREE

    told = set(spans(ROOT / "docs" / "runs.md"))
    assert not {key for key in FREE if key not in told} - {"run", "resume"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        assert target.startswith(("http://", "https://")) or (page.parent / target).exists(), target


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grpo_in_one_file", ROOT / "examples" / "00_grpo_in_one_file.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_trains_what_it_samples(example: ModuleType, tiny: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    end = example.end_ids(model, AutoTokenizer.from_pretrained(tiny))
    assert end == {2}
    prompt = [5, 6, 7, 8]
    torch.manual_seed(0)
    free = example.sample(model, prompt, 8, 10, 0.7, set())
    end = {free[0][0][4]}
    torch.manual_seed(0)
    answers = example.sample(model, prompt, 8, 10, 0.7, end)
    with torch.no_grad():
        for (tokens, old), (whole, _) in zip(answers, free, strict=True):
            stop = next((i + 1 for i, token in enumerate(whole) if token in end), len(whole))
            assert tokens == whole[:stop]
            logp = example.logprobs_of(model, prompt, tokens, 0.7)
            torch.testing.assert_close(logp, torch.tensor(old), atol=1e-5, rtol=0)
    assert len({len(tokens) for tokens, _ in answers}) > 1


def test_the_formulas_of_the_example_are_ours(example: ModuleType) -> None:
    from birl.algorithms import advantages
    from birl.algorithms.surrogates import clip

    rewards = [1.0, 0.0, 0.0, 1.0, 0.5]
    group = torch.zeros(5, dtype=torch.long)
    ours = advantages.scale(advantages.centre(torch.tensor(rewards), group, "group"), group, "group")
    torch.testing.assert_close(torch.tensor(example.advantages(rewards)), ours)
    assert example.advantages([1.0, 1.0]) == [0.0, 0.0] and example.advantages([1.0]) == [0.0]
    logp, old = torch.randn(50), torch.randn(50)
    for advantage in (-1.5, 0.5):
        ones = torch.full((50,), advantage)
        expected = clip(logp, old, ones, torch.arange(50), clip_low=0.2, clip_high=0.2).loss
        torch.testing.assert_close(example.loss_of(logp, old, advantage), expected)
    assert example.reward("9 + 3 = 12", "12") == 1 and example.reward("12 or 13", "12") == example.reward("", "12") == 0


def test_the_example_runs(example: ModuleType, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example.main([*f"--model {tiny} --steps 2 --prompts 2 --group 3 --max-tokens 6 --updates 2".split()])
    assert re.findall(r"step (\d): reward [01]\.\d{3}", capsys.readouterr().out) == ["1", "2"]
    lines = (ROOT / "examples" / "00_grpo_in_one_file.py").read_text().splitlines()
    assert len(lines) <= 120 and not any(re.match(r"(from|import) birl", line) for line in lines)
    assert os.environ.get("TOKENIZERS_PARALLELISM") == "false"
