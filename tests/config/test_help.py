"""Every key is documented, and the help page shows every key at any width."""

import re
from dataclasses import dataclass

import pytest

from birl.config.file import flatten
from birl.config.help import EVERYDAY, EXAMPLES, Own, render
from birl.config.keys import SHORTHANDS, documentation, presets, written
from birl.config.schema import COMMANDS, RL, Eval


@dataclass
class Sample:
    documented: int = 3
    """How many there are, in two
    lines [tokens]; more."""
    bare: str = ""
    listed: str = ""
    """As in [one] or [one,two]; `pip install birl[more]`."""


@dataclass
class Bare:
    pass


@pytest.mark.parametrize("schema", [RL, Eval])
def test_every_key_has_a_text(schema: type):
    assert [key for key, doc in documentation(schema).items() if not doc.text] == []


def test_documentation_reads_text_unit_and_type():
    docs = documentation(Sample)
    assert docs["documented"].text == "How many there are, in two lines; more."
    assert (docs["documented"].unit, docs["documented"].type, docs["documented"].default) == ("tokens", "int", 3)
    assert docs["bare"].text == ""
    assert (docs["listed"].unit, docs["listed"].text) == ("", "As in [one] or [one,two]; `pip install birl[more]`.")


def test_documentation_of_real_keys():
    docs = documentation(RL)
    assert docs["rollout.max_tokens"].unit == "tokens per turn"
    assert docs["data.train"].type == "list[str]" and docs["data.train"].section == "data"
    assert docs["seed"].section == ""
    assert {key: doc.default for key, doc in docs.items()} == flatten(RL())


@pytest.mark.parametrize("width", [60, 80, 119, 120, 200])
@pytest.mark.parametrize(("command", "schema"), [("rl", RL), ("eval", Eval)])
def test_the_page_shows_everything_and_fits(command: str, schema: type, width: int):
    page = render(command, schema, width, ("all",))
    assert max(map(len, page.splitlines())) <= width
    assert "\033" not in page
    words = " ".join(page.split())
    for key, doc in documentation(schema).items():
        assert f"{key}=" in page
        assert doc.text in words
    for group, files in presets(schema).items():
        assert all(f"{group}={name}" in page for name in files)
    assert f"birl {command} data." in page


@pytest.mark.parametrize("command", COMMANDS)
def test_the_first_page_fits_one_screen(command: str):
    schema, page = COMMANDS[command], render(command, COMMANDS[command], 100)
    shown = re.findall(r"^  ([a-z_.]+)=\S*(?: \[[^\]]+\])?  +\S", page, re.MULTILINE)
    keys = [key for key in documentation(schema) if key in shown]
    assert len(page.splitlines()) <= 45 and 14 <= len(keys) <= 25
    assert set(shown) <= documentation(schema).keys() | presets(schema).keys()
    assert not any(line.endswith("...") for line in page.splitlines() if re.match(r"  [a-z_.]+=", line))
    assert f"birl {command} --help all" in page


def test_every_key_of_the_first_page_exists():
    named = {key for groups in EVERYDAY.values() for keys in groups.values() for key in keys.split()}
    assert named <= {key for schema in COMMANDS.values() for key in documentation(schema)} | {"algorithm"}


@pytest.mark.parametrize(
    ("word", "keys"),
    [
        ("batch_size", ["rollout.prompts", "learner.tokens_per_microbatch"]),
        ("lr_scheduler_type", ["optimizer.schedule"]),
        ("num_generations", ["rollout.group_size"]),
        ("--gpu", ["model.device", "engine.count", "parallel.fsdp"]),
        ("max_completion_length", ["rollout.max_tokens"]),
        ("warm-up", ["optimizer.warmup_steps"]),
    ],
)
def test_a_word_of_another_library_finds_keys(word: str, keys: list[str]):
    page = render("rl", RL, 100, (word.lstrip("-"),))
    assert all(f"  {key}=" in page for key in keys) and len(page.splitlines()) < 45


def test_words_after_help_filter():
    page = render("rl", RL, 80, only=("optimizer.lr",))
    assert "optimizer.lr=" in page and "seed=" not in page
    assert "lists them all" in render("rl", RL, 80, only=("zzz",))


def test_an_environments_own_keys_stand_behind_the_others():
    own = Own(kind="mine", section=Sample)
    page = render("rl", RL, 80, only=("env",), own=own)
    assert page.index("env.max_turns=") < page.index(
        "env: keys of mine\n  env.documented=3  int [tokens]\n      How many"
    )
    assert "  env.bare=  str\n  env.listed=" in page  # it has no text, and no empty line
    assert render("rl", RL, 80, only=("zzz",), own=Own(kind="mine", section=Bare)).endswith("keys of mine\n  none")


def test_headings_are_bold_only_on_request():
    assert "\033[1moptimizer\033[0m" in render("rl", RL, 80, ("all",), bold=True)


def test_examples_name_valid_keys():
    for command, schema in (("rl", RL), ("eval", Eval)):
        shorthands = {*presets(schema), *SHORTHANDS}
        for line in EXAMPLES[command].splitlines():
            words = line.partition("  #")[0].split()[2:]
            keys = {word.partition("=")[0] for word in words if "=" in word}
            assert keys <= documentation(schema).keys() | shorthands


def test_values_are_written_as_typed():
    assert [written(value) for value in (True, [1, "a"], 1e-6, 0.04, "x", [])] == [
        "true",
        "[1,a]",
        "1e-06",
        "0.04",
        "x",
        "[]",
    ]
