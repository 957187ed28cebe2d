"""Sizes of the package, so that growth is a decision: a bound is lowered when code goes, and raised with a reason."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@cache
def modules() -> dict[str, Path]:
    names = {
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path for path in ROOT.glob("birl/**/*.py")
    }
    return {name.removesuffix(".__init__"): path for name, path in names.items()}


def lines(paths: list[Path]) -> int:
    return sum(path.read_bytes().count(b"\n") for path in paths)


@cache
def imports(name: str) -> frozenset[str]:
    """What a module imports of the package when it is imported itself."""
    found: set[str] = set()

    def visit(statements: list[ast.stmt]) -> None:
        for node in statements:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("birl"):
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                found.update(inside & modules().keys() or {str(node.module)})
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                continue
            elif isinstance(node, ast.If | ast.Try):
                visit([*node.body, *node.orelse])

    visit(ast.parse(modules()[name].read_bytes()).body)
    return frozenset(found)


def reached(name: str) -> set[str]:
    todo, seen = [name], {name}
    while todo:
        new = imports(todo.pop()) - seen
        seen |= new
        todo += new
    return seen


def reading_path() -> list[Path]:
    text = (ROOT / "docs/how_it_works.md").read_text(encoding="utf-8")
    return [ROOT / name for name in sorted(set(re.findall(r"birl/[\w/]+\.py", text)))]


@pytest.mark.parametrize(
    ("what", "bound"),
    # 63,720 lines before weights over NCCL and IPC, quantised LoRA, layers fused on ranks and truncation in graphs
    # 1,450, 25 of them to read, and 10 files for tools of MCP servers, the sandbox of a program that is talked to, kept
    # responses and threads that are read again, and Harbor's task folders
    # 1,000 and 7 files for judges: rubrics, groups, pairs, panels, and how far they agree with people
    # 480, 35 of them to read, and 3 files for divergences from a teacher over the vocabulary
    # 250, 75 of them to read, 25 in train/, and 2 files for the policy as its own teacher, with a hint
    # 160, 75 of them to read, for pictures whose tokens see one another and towers that are split over ranks
    # 75, 30 of them to read, 10 in train/, for the most likely tokens of a teacher that is served
    # 520, 165 of them to read, 35 of train/, and 3 files for several policies and a league
    # 126 and a file for dithered weights, 45 for SAO
    # 377, 119 of them to read, 4 in train/, and 2 files for the tokens that top-k, top-p and min-p keep
    # 86 for ECHO, 135 for several teachers, 225 and a file for models on the hub
    # 200 for what strangers may send `birl tinker`, damaged files of its folder, and what commands leave for tests
    # 175 and a file for what one tenant of `birl tinker` may have
    # 110 and a file for Mamba 1, models without attention, and limits of time steps
    # 175 for full disks, answers that nobody fetches, the search of sessions, and what `birl tinker` does not offer
    # 75 and a file for lightning attention and RG-LRU
    # 445 and 3 files for tasksets of verifiers 0.4: loading, playing, and its chat program
    # 35 for the canary after a resume, sums of low-rank additions that are rounded once, files within values of a job
    # 98 for what a row, a folder, a tokenizer or a key says and nothing read
    # 238 and a file for micro-batches that ranks are sent: their bytes, calls with lists that are shared out
    # 97, 7 of them to read, for steps that give up refilling, policies normalised apart, servers of rewards and
    # teachers that are looked for first and asked again, and replays that stop and go on
    # 182 and a file for Harbor's tasks in containers, 223 and a file for rollout weights in int8
    # 301 and a file for models that hand their layout to no attention, and models that see under tp, cp and ep
    # 550 and 2 files for `birl tinker`: pictures, and passes on several ranks
    # 389 and 2 files for sampling kernels that read logits once, digests on the card, two waits of a step, states in
    # graphs and supports in the plan; 125 for files and calls that keep what they say; 2 files that were one
    # 323 for `birl tinker` on split ranks and engines, 191 for stored fp8, long rope and states under tp and cp,
    # 134 for references of losses, judges, GGUF and hub, 86 for mistakes told before anything loads, 69 for what a rank
    # holds; 10 files and 305 lines fewer for what stood twice
    # 270 and 3 files for answers that are not the gold one, and tests that a solution may have; 190 for likely tokens
    # and long prompts of servers, 190 for `birl tinker` after kills, 120 for lists of launch.* and shared disks, 90 for
    # models that transformers reads in part, 75 for weights on their GPU and the plan of a run; 175 fewer for what was
    # there twice, and 5 files for concepts of their own (kernels, plan, train, trainer, step folders)
    # 20 files and 1,000 lines fewer for what stood twice or was called once; as many lines more for answers of tools,
    # half-closed connections, ranks of `birl tinker` that start again, tensor parallelism of joined matrices, exact
    # numbers of rows, and what a Trainer's parameters cannot take
    # 470 for tools and environments of TRL, templates of today's models, notations of mathematics, errors of own
    # functions, ranks on several machines, and bounds of what servers parse
    # 340 for guards of processes, exports and caches that kills and full disks leave whole, and vLLM's pictures
    # 56 for the date in templates, end tokens of Phi 3, tests that name a solution in a text, and losses that fail late
    [("lines", 84_336), ("files", 488), ("lines of train/", 2_800), ("lines to read", 8_310), ("files to read", 37)],
)
def test_the_package_does_not_grow_unnoticed(what: str, bound: int) -> None:
    every = list(modules().values())
    sizes = {
        "lines": lines(every),
        "files": len(every),
        "lines of train/": lines([p for p in every if p.parent.name == "train"]),
        "lines to read": lines(reading_path()),
        "files to read": len(reading_path()),
    }
    assert sizes[what] <= bound


def test_the_readme_knows_the_size() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.search(r"about ([\d,]+) lines \((`[^)]+`)\); the other ([\d,]+)", text)
    assert shown is not None
    core = lines([p for name in re.findall(r"\w+", shown[2]) for p in (ROOT / "birl" / name).rglob("*.py")])
    every = lines(list(modules().values()))
    assert [core // 1000, every // 1000 - core // 1000] == pytest.approx(
        [int(shown[n].replace(",", "")) / 1000 for n in (1, 3)], abs=1
    )


@pytest.mark.parametrize(
    ("loop", "bound"),
    # 6 for the rules of layers, the proof of a model, what follows its head, states, columns and trees;
    # 3 or 4 for pictures: their tokens, their parts in messages, the vision tower, its features in the engine
    # 1 for the rules of policies, 1 for their engines, 2 for supports: of samples, and of batches; 1 for addresses
    # 1 for what ranks are sent, 1 in RL for weights that are gathered from them
    [("sft", 71), ("rm", 73), ("dpo", 74), ("rl", 158), ("build_rows", 126), ("build", 188)],  # rounding
)
def test_a_loop_imports_what_it_needs(loop: str, bound: int) -> None:
    """And what builds it: the files of birl that a run of the command loads."""
    assert len(reached(f"birl.train.{loop}")) <= bound


def test_functions_fit_a_screen() -> None:
    functions = [
        (node.name, path.name)
        for path in modules().values()
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno >= 60
    ]
    assert not functions
