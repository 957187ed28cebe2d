"""`key=value` words become a configuration, or one message that names the key, the nearest valid one and the fix."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.version import getbase

from birl.cli.chat import Settings
from birl.config.file import flatten, to_yaml
from birl.config.keys import documentation, presets
from birl.config.load import _composed, load, load_with_choices, read_section, run_folder
from birl.config.nearest import nearest_keys
from birl.config.schema import RL, Eval
from birl.errors import BirlError
from birl.jobs import sweep, swept_keys

TRAIN = "data.train=a.jsonl"


def message(*overrides: str, schema: type = RL) -> str:
    with pytest.raises(BirlError) as error:
        load(schema, list(overrides))
    return str(error.value)


def test_defaults_are_the_dataclass_defaults():
    config, choices = load_with_choices(RL, [TRAIN])
    expected = RL()
    expected.data.train = ["a.jsonl"]
    assert config == expected
    assert type(config.algorithm).__name__ == "Algorithm"
    assert choices == {"algorithm": "dr_grpo", "model": "smollm2"}


def test_eval_loads_and_has_no_algorithm():
    config, choices = load_with_choices(Eval, ["data.validation=b.jsonl"])
    assert isinstance(config, Eval) and config.data.validation == ["b.jsonl"]
    assert choices == {"model": "smollm2"}


def test_loading_leaves_hydra_as_it_was():
    GlobalHydra.instance().clear()
    for _ in range(2):
        _composed.cache_clear()
        load(RL, [TRAIN])
    assert not GlobalHydra.instance().is_initialized()


def test_an_application_of_hydra_and_threads_load_configurations(tmp_path: Path) -> None:
    (tmp_path / "app.yaml").write_text("rate: 3\n")
    with initialize_config_dir(config_dir=str(tmp_path), version_base="1.2"), ThreadPoolExecutor(4) as threads:
        _composed.cache_clear()
        assert all(threads.map(lambda _: load(RL, [TRAIN]).data.train == ["a.jsonl"], range(4)))
        assert compose("app") == {"rate": 3} and str(getbase()) == "1.2"


def test_scalars_get_their_types():
    config = load(RL, [TRAIN, "optimizer.lr=1e-5", "rollout.prompts=4", "data.shuffle=false", "seed=7"])
    assert (config.optimizer.lr, config.rollout.prompts, config.data.shuffle, config.seed) == (1e-5, 4, False, 7)


def test_the_last_word_wins():
    assert load(RL, [TRAIN, "seed=1", "seed=2"]).seed == 2


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("data.train=a.jsonl", ["a.jsonl"]),
        ("data.train=[a.jsonl,b.csv]", ["a.jsonl", "b.csv"]),
        ("data.train=train@openai/gsm8k", ["train@openai/gsm8k"]),
        ('data.train=["my file, really.jsonl"]', ["my file, really.jsonl"]),
        ("data.train='a,b.jsonl'", ["a,b.jsonl"]),
        ("data.train=/tmp/x y (1).jsonl", ["/tmp/x y (1).jsonl"]),
    ],
)
def test_a_list_takes_one_bare_value(word: str, expected: list[str]):
    assert load(RL, [word]).data.train == expected


def test_lists_of_numbers():
    config = load(RL, ["data.train=[a,b]", "data.weights=[2,0.5]", "validation.k=1"])
    assert config.data.weights == [2.0, 0.5] and config.validation.k == [1]


@pytest.mark.parametrize(
    "text", ["Answer briefly, please!", "a=b", "^x{2}(y|z)\\s*$", "off", "1e-5", "it's", "[x]", ""]
)
def test_text_is_taken_as_it_is(text: str):
    assert load(RL, [TRAIN, f"data.system_prompt={text}"]).data.system_prompt == text


def test_quotes_around_a_text_are_removed():
    assert load(RL, [TRAIN, "data.system_prompt='a, b'"]).data.system_prompt == "a, b"


def test_a_key_can_copy_another():
    assert (
        load(RL, [TRAIN, "data.validation=b", "validation.max_tokens=${rollout.max_tokens}"]).validation.max_tokens
        == 256
    )
    assert "rollout.nothing" in message(TRAIN, "validation.max_tokens=${rollout.nothing}")


def test_a_refused_number_of_a_file_is_told_with_the_file(tmp_path: Path):
    (tmp_path / "my.yaml").write_text("rollout:\n  prompts: 0\n")
    text = message(TRAIN, f"{tmp_path}/my.yaml", "seed=-1")
    assert f"{tmp_path}/my.yaml: rollout.prompts=0: must be at least 1." in text
    assert text.splitlines()[0].startswith("seed=-1: must be") and len(text.splitlines()) == 2


def test_reward_is_short_for_its_functions(tmp_path: Path):
    (tmp_path / "my_file.py").write_text("def score(completions, **columns): return [0.0]")
    assert load(RL, [TRAIN, "reward=[math,format]"]).reward.functions == ["math", "format"]
    assert load(RL, [TRAIN, f"reward={tmp_path}/my_file.py:score"]).reward.functions == [f"{tmp_path}/my_file.py:score"]


@pytest.mark.parametrize("path", ["/some/folder", "x.Q4_1", "org/name", "gpt2"])
def test_model_may_be_a_path(path: str):
    config, choices = load_with_choices(RL, [TRAIN, f"model={path}"])
    assert config.model.path == path and "model" not in choices


def test_keys_override_their_preset_in_any_order():
    assert load(RL, [TRAIN, "algorithm.kl_coef=0", "algorithm=grpo"]).algorithm.kl_coef == 0


@pytest.mark.parametrize(("group", "preset"), [(group, name) for group, files in presets(RL).items() for name in files])
def test_every_preset_passes_check(group: str, preset: str):
    needed = {"distill": ["algorithm.teacher=model"], "echo": ["env=guess_number"]}
    assert load_with_choices(RL, [TRAIN, f"{group}={preset}", *needed.get(preset, ())])[1][group] == preset


def test_a_yaml_file_sets_keys_and_words_after_it_win(tmp_path: Path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("algorithm: grpo\nalgorithm.kl_coef: 0\ndata: {train: [a.jsonl]}\ntrack: {wandb: off}\nseed: 3\n")
    config, choices = load_with_choices(RL, [str(recipe), "seed=4"])
    assert (config.seed, config.track.wandb, config.algorithm.kl_coef) == (4, "off", 0.0)
    assert choices["algorithm"] == "grpo"


def test_mistakes_in_a_yaml_file_name_the_file(tmp_path: Path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("optimizer: {learning_rat: 1}\n")
    assert "recipe.yaml" in message(str(recipe)) and "optimizer.lr" in message(str(recipe))
    recipe.write_text("a: [")
    assert "not valid YAML" in message(str(recipe))
    assert "cannot be read" in message(str(tmp_path / "none.yaml"))


def test_a_section_that_is_there_twice_is_refused(tmp_path: Path):
    """YAML itself would forget the first."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("optimizer: {lr: 1e-5}\ndata:\n  train: a.jsonl\noptimizer: {schedule: cosine}\n")
    assert "recipe.yaml, line 4, column 1" in message(str(recipe))
    assert "optimizer is there twice" in message(str(recipe))
    recipe.write_text("optimizer.lr: 1e-5\noptimizer: {lr: 2e-5}\n")
    assert "recipe.yaml: optimizer.lr is there twice" in message(str(recipe))


def test_merge_keys_are_refused_by_name(tmp_path: Path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("optimizer: &base\n  lr: 1e-5\ncritic:\n  <<: *base\n")
    assert "recipe.yaml, line 4, column 3: is not valid YAML: merge keys (<<) are not supported" in message(str(recipe))


def test_printed_yaml_loads_to_the_same_values(tmp_path: Path):
    words = ["data.train=[a,b]", "data.system_prompt=cost \\${x}, 'quoted'", "track.console=off", "optimizer.lr=3e-7"]
    config = load(RL, [*words, "algorithm=dapo", "rollout.stop=[yes,'1']"])
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert config.data.system_prompt == "cost ${x}, 'quoted'"
    assert load(RL, [str(file)]) == config
    file.write_text(
        "data: {train: [a], system_prompt: '\"Hi\"'}\nreward: {functions: [math]}\nrollout: {stop: '[END]'}\n"
    )
    config = load(RL, [str(file)])
    assert (config.data.system_prompt, config.rollout.stop) == ('"Hi"', ["[END]"])
    file.write_text(to_yaml(config))
    assert load(RL, [str(file)]) == config


def test_flatten_has_every_key_once():
    flat = flatten(RL())
    assert list(flat) == list(documentation(RL))
    assert flat["rollout.group_size"] == 8


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("lr=1e-5", "optimizer.lr"),
        ("trainer.lr=1", "optimizer.lr"),
        ("learning_rate=1", "optimizer.lr"),
        ("optimizer.lrr=1", "optimizer.lr"),
        ("rollout.groupsize=4", "rollout.group_size"),
        ("rollout.group-size=4", "rollout.group_size"),
        ("rollout.group=4", "rollout.group_size"),
        ("num_generations=4", "rollout.group_size"),
        ("beta=0.1", "algorithm.kl_coef"),
        ("sead=1", "seed"),
        ("rewards=math", "reward.functions"),
        ("envs=[math]", "env.kind"),
        ("models=smollm2", "model.path"),
        ("modle=smollm2", "model.path"),
        ("algorithms=grpo", "algorithm"),
        ("engines=vllm", "engine.kind"),
    ],
)
def test_an_unknown_key_names_the_nearest(word: str, nearest: str):
    text = message(TRAIN, word)
    assert word in text and f"Did you mean {nearest}" in text and "birl rl --help" in text


def test_a_section_lists_its_keys():
    assert "data.train" in message("data=a.jsonl")


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("optimizer.lr=fast", ["takes a number", "Peak learning rate", "1e-06"]),
        ("rollout.prompts=2.5", ["takes a whole number", "Prompts per step"]),
        ("data.shuffle=maybe", ["takes true or false"]),
        ("reward.weights=[a]", ["takes a list", "list[float]"]),
        ("seed=null", ["no key can be null", "seed=0"]),
        ("data.system_prompt=None", ["no key can be null", "its default is data.system_prompt="]),
        ("data.system_prompt=~", ["no key can be null"]),
        ("seed=", ["takes a whole number"]),
        ("validation.k=[true]", ["takes a list", "list[int]"]),
        ("rollout.stop=[END]", ["rollout.stop=END for END", """'rollout.stop=["[END]"]' for [END]"""]),
        ("data.train=[[a]]", ["takes a list", "list[str]"]),
        ("rollout.prompts=1,2", ["--multirun"]),
        ("data.train=a,b", ["data.train=[a,b]", "--multirun"]),
        ("reward=[math", ["reward=[math", "not complete"]),
        ("algorithm=grpoo", ["dppo | dr_grpo", "Did you mean grpo?"]),
        ("algorithm=grpo,dapo", ["--multirun"]),
        ("model=smolm2", ["Did you mean smollm2?", "model.path=smolm2"]),
        ("--optimizer.lr=1", ["without dashes", "optimizer.lr=1"]),
        ("+seed=1", ["seed="]),
        ("~seed", ["Did you mean seed=...?", "removed (~)"]),
        ("seed", ["seed=VALUE"]),
        ("=1", ["no key"]),
        ("rollout.top_p=???", ["null or missing", "rollout.top_p=1"]),
    ],
)
def test_mistakes_are_explained(word: str, parts: list[str]):
    text = message(TRAIN, word)
    for part in parts:
        assert part in text


def test_all_mistakes_come_at_once():
    assert len(message(TRAIN, "lr=1", "seed=x", "algorithm=z", "foo", "optimizer.lr=2").splitlines()) == 5


def test_nearest_keys_are_valid_for_their_schema():
    assert nearest_keys("max_tokens", Eval) == ["validation.max_tokens"]
    assert nearest_keys("num_generations", Eval) == []


def test_sweep_is_the_product_with_the_last_key_fastest():
    jobs = sweep(["a.jsonl", "seed=range(0,2)", "algorithm=grpo,dapo", "data.train=[a,b]", "data.system_prompt=Hi!"])
    assert [job[1:3] for job in jobs] == [
        ["seed=0", "algorithm=grpo"],
        ["seed=0", "algorithm=dapo"],
        ["seed=1", "algorithm=grpo"],
        ["seed=1", "algorithm=dapo"],
    ]
    assert all(job[3:] == ["data.train=[a,b]", "data.system_prompt=Hi!"] for job in jobs)


def test_sweep_of_choices_and_lists():
    assert sweep(["optimizer.lr=choice(1e-6,1e-5)"]) == [["optimizer.lr=1e-06"], ["optimizer.lr=1e-05"]]
    assert sweep(["data.train=[a],[b]"]) == [["data.train=[a]"], ["data.train=[b]"]]
    assert swept_keys(["seed=1", "optimizer.lr=1e-6,1e-5", "data.train=[a,b]"]) == ["optimizer.lr"]
    assert sweep([]) == [[]]
    with pytest.raises(BirlError, match=r"optimizer\.lr=a,b"):
        sweep(["optimizer.lr=interval(0,1)"])
    with pytest.raises(BirlError, match="empty"):
        sweep(["seed=range(0,0)"])


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        (["data.train=data/gsm8k/train.jsonl"], "runs/smollm2-gsm8k-dr_grpo-0"),
        (["data.train=train@openai/gsm8k", "model=org/Name-1.7B", "seed=3"], "runs/Name-1.7B-gsm8k-dr_grpo-3"),
        (["data.train=../train.jsonl", "algorithm=grpo"], "runs/smollm2-train-grpo-0"),
        (["data.train=a b.csv", "model=x.Q4_1", "run=here"], "here"),
    ],
)
def test_run_folder(words: list[str], folder: str):
    assert run_folder(*load_with_choices(RL, words)) == folder


@pytest.mark.parametrize("words", [[TRAIN, "run=~/a"], [TRAIN, "a.yaml"]], ids=["word", "file"])
def test_no_folder_of_the_name_tilde(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    Path("a.yaml").write_text("run: ~/a")
    assert load(RL, words).run == "/home/me/a"


def test_run_folder_leaves_out_what_is_swept():
    config, choices = load_with_choices(RL, [TRAIN])
    assert run_folder(config, choices, without=["seed", "optimizer.lr"]) == "runs/smollm2-a-dr_grpo"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("optimizer: " + "[" * 100_000, "nested too deep"),
        ("optimizer: " + "[" * 50 + "]" * 50, "nested deeper than 32"),
        ("a0: &a0 [x]\n" + "".join(f"a{n + 1}: &a{n + 1} [{f'*a{n}, ' * 9}]\n" for n in range(9)), "entries"),
        ("optimizer: &a [*a]", "an alias is in what it names"),
        ("optimizer: &a {lr: *a}", "an alias is in what it names"),
    ],
)
def test_a_yaml_file_that_would_not_end_is_refused(tmp_path: Path, text: str, reason: str):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(BirlError, match=reason):
        load(RL, [str(tmp_path / "bad.yaml")])


def test_aliases_in_a_yaml_file_are_what_they_name(tmp_path: Path):
    (tmp_path / "a.yaml").write_text("seed: &n 7\nsteps: *n\n")
    config = load(RL, [str(tmp_path / "a.yaml"), "data.train=x.jsonl"])
    assert (config.seed, config.steps) == (7, 7)


def test_a_key_without_a_text_is_not_told_what_it_is() -> None:
    """The message ended with "It is: "."""
    with pytest.raises(BirlError, match=r"temperature takes a number \(float, default 0\.7\)\.$"):
        read_section(Settings, {"temperature": "hot"}, "")


def test_a_run_of_multirun_is_a_model(tmp_path: Path) -> None:
    """Its folder has an = in its name."""
    run = tmp_path / "lr=1e-05,seed=0"
    (run / "model").mkdir(parents=True)
    (run / "config.json").write_text("{}")
    keys = ["data.validation=my.jsonl"]
    assert load(Eval, [*keys, str(run)]).model.path == load(Eval, [*keys, f"model={run}"]).model.path == str(run)
