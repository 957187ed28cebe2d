"""Impossible values and combinations are refused, each with the key, its value and the fix."""

import sys
from pathlib import Path
from typing import Any, TypeVar

import pytest

from birl.config.check import check, problems
from birl.config.decided import algorithm_notes, corrects, proximal
from birl.config.file import flatten
from birl.config.keys import documentation
from birl.config.load import load
from birl.config.schema import DPO, RL, RM, SFT, Data, Eval, LabelledPairs, RankedPairs, Serve, Texts
from birl.errors import BirlError, did_you_mean

T = TypeVar("T")


def config(**values: object) -> RL:
    """An RL configuration with `section__key=value` changed."""
    return _set(RL(data=Data(train=["a.jsonl"])), values)


def evaluation(**values: object) -> Eval:
    return _set(Eval(data=Data(validation=["a.jsonl"])), values)


def _set(target: T, values: dict[str, object]) -> T:
    for name, value in values.items():
        section, _, key = name.rpartition("__")
        setattr(getattr(target, section) if section else target, key, value)
    return target


def test_answers_of_older_weights_are_corrected_unless_somebody_says_otherwise():
    stale = config(rollout__max_staleness=1)
    assert (proximal(config()), proximal(stale)) == ("behaviour", "recompute")
    assert corrects(stale) and not corrects(config())
    assert not corrects(config(rollout__max_staleness=1, algorithm__correction="none"))


@pytest.mark.parametrize("name", ["gspo", "gmpo", "cispo", "sapo", "dppo", "m2po"])
def test_a_ratio_against_what_sampled_stays_so_when_answers_are_old(name: str):
    stale = load(RL, ["data.train=x", f"algorithm={name}", "rollout.max_staleness=2"])
    assert proximal(stale) == "behaviour" and not corrects(stale) and not algorithm_notes(stale)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("algorithm=grpo rollout.max_staleness=2", True),
        ("algorithm=dppo algorithm.proximal=recompute", True),
        ("algorithm=grpo", False),
        ("algorithm=grpo rollout.max_staleness=2 algorithm.updates_per_batch=2", False),
        ("algorithm=grpo rollout.max_staleness=2 algorithm.proximal=behaviour", False),
    ],
)
def test_a_run_in_which_the_surrogate_bounds_nothing_says_so(words: str, said: bool):
    notes = algorithm_notes(load(RL, ["data.train=x", *words.split()]))
    assert bool(notes) == said and all("bounds nothing in this run" in text for text in notes)


def preferences(**values: object) -> DPO:
    return _set(DPO(data=LabelledPairs(train=["a.jsonl"])), values)


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"preference__margin": 0.5}, ["preference.loss=dpo does not read it"]),
        ({"preference__loss": "robust"}, ["preference.label_smoothing", "0.1"]),
        ({"preference__loss": "simpo", "preference__reference": "precomputed"}, ["simpo does not read it"]),
        ({"preference__loss": "kto", "batch_size": 1}, ["batch_size=1", "2 or more"]),
        ({"preference__loss": "kto", "preference__reference": "precomputed"}, ["set preference.reference=live"]),
        ({"data__label_column": "good"}, ["data.label_column=good", "does not read it"]),
        ({"validation__every": 5}, ["no held-out data"]),
        ({"data__train": []}, ["birl dpo data.train=my.jsonl"]),
    ],
)
def test_preferences_that_cannot_be(values: dict[str, object], parts: list[str]):
    found = "\n".join(problems(preferences(**values)))
    assert all(part in found for part in parts), found


def test_roles_of_sft():
    for roles, part in (([], "is empty"), (["all", "user"], "includes every role")):
        found = problems(SFT(data=Texts(train=["a.jsonl"], train_on=roles)))
        assert len(found) == 1 and part in found[0]


SCHEMAS = (RL, SFT, RM, DPO, Eval, Serve)


def with_key(key: str) -> Any:
    """A configuration that passes, of the first schema that has the key."""
    schema = next(s for s in SCHEMAS if key in documentation(s))
    if schema is Serve:
        return Serve()
    files = next(f for f in (Data, Texts, RankedPairs, LabelledPairs) if type(schema().data) is f)  # pyright: ignore
    return schema(data=files(train=["a.jsonl"]))  # pyright: ignore


DOCS = {key: doc for schema in SCHEMAS for key, doc in documentation(schema).items()}
NUMBERS = sorted(key for key, doc in DOCS.items() if "int" in doc.type or "float" in doc.type)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_default_is_allowed(schema: type):
    assert problems(evaluation() if schema is Eval else with_key(next(iter(documentation(schema))))) == []


@pytest.mark.parametrize("key", NUMBERS)
def test_numbers_out_of_range_are_refused_by_name(key: str):
    doc = DOCS[key]
    bad = float("nan") if "float" in doc.type else -1
    found = problems(_set(with_key(key), {key.replace(".", "__"): [bad] if doc.several else bad}))
    assert [t for t in found if t.startswith(f"{key}=")] == [f"{key}={bad}: must be {doc.range or 'a finite number'}."]


@pytest.mark.parametrize("key", sorted(key for key, doc in DOCS.items() if doc.choices))
def test_unknown_words_are_refused_with_the_list(key: str):
    doc = DOCS[key]
    assert all(name in doc.text for name in doc.choices)
    found = problems(_set(with_key(key), {key.replace(".", "__"): ["nonsense"] if doc.several else "nonsense"}))
    assert any(text.startswith(f"{key}=nonsense: ") and doc.choices[0] in text for text in found)


HELD_OUT = {"data__validation": ["b.jsonl"]}


def test_every_0_switches_validation_off_whatever_its_keys_are():
    assert problems(config(**HELD_OUT, validation__every=0, validation__threshold=0.5)) == []


def test_a_folder_or_a_hub_set_may_have_subsets_and_splits(tmp_path: Path):
    for places in (["a.jsonl", str(tmp_path)], ["openai/gsm8k"]):
        changed = {"data__subset": "main", "data__split": "x", "data__validation_data_split": "y"}
        assert problems(config(data__train=places, data__validation=places, **changed)) == []


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"data__train": []}, ["birl rl data.train=my.jsonl", "recipe"]),
        ({"data__weights": [1.0, 2.0]}, ["2 weights for 1 training sets"]),
        ({"data__weights": [0.0]}, ["all weights are 0"]),
        ({"data__validation_split": 0.1, "data__validation": ["b"]}, ["data.validation_split=0.1", "remove one"]),
        ({"data__validation_data_split": "test"}, ["data.validation is empty"]),
        ({"data__max_validation_samples": 5}, ["no held-out data"]),
        ({"validation__every": 5}, ["validation.every=5", "no held-out data"]),
        ({"validation__max_tokens": 5}, ["validation.max_tokens=5", "no held-out data"]),
        ({"data__subset": "main"}, ["data.subset=main: has no effect because a file has no splits"]),
        ({"data__train": ["test@folder"], "data__split": "x"}, ["data.split=x", "split@ names one already"]),
        (
            {"data__validation": ["b.jsonl"], "data__validation_data_split": "test"},
            ["data.validation_data_split=test: has no effect because a file has no splits"],
        ),
        ({"algorithm__credit": "turn"}, ["algorithm.credit=turn: has no effect because env.kind=single_turn"]),
        (
            {"algorithm__proximal": "recompute", "algorithm__correction": "none", "algorithm__correction_high": 3.0},
            ["algorithm.correction_high=3", "algorithm.correction=none does not read it"],
        ),
        (
            {"engine__recompute_kv": False},
            ["engine.recompute_kv=false", "with rollout.max_staleness=0 weights never change"],
        ),
        (
            {"engine__kind": "vllm", "engine__attach": ["http://a:1"], "engine__memory_fraction": 0.5},
            ["engine.memory_fraction=0.5", "uses running servers"],
        ),
        (
            {"env__kind": "guess_number", "reward__workers": 2},
            ["reward.workers=2: has no effect because env=guess_number computes the rewards"],
        ),
        ({"env__kind": "guess_number", "reward__timeout": 9.0}, ["reward.timeout=9", "computes the rewards"]),
        ({"data__system_prompt": "x", "data__apply_chat_template": False}, ["data.system_prompt"]),
        ({"rollout__top_p": 0.9, "engine__kind": "vllm"}, ["rollout.top_p=0.9", "engine.kind=vllm", "rollout.top_p=1"]),
        ({"rollout__top_k": 129, "engine__kind": "vllm"}, ["rollout.top_k=129", "at most 128", "rollout.top_k=0"]),
        ({"rollout__min_p": 0.1, "engine__kind": "sglang"}, ["rollout.min_p=0.1", "rollout.min_p=0"]),
        (
            {"rollout__top_k": 50, "algorithm__teacher": "http://a:1/v1/completions#t"},
            ["rollout.top_k=50", "over all tokens", "rollout.top_k=0"],
        ),
        ({"rollout__top_k": 10**5}, ["rollout.top_k=100000", "65536"]),
        ({"rollout__temperature": 0.0}, ["rollout.temperature=0", "greedy"]),
        ({"rollout__max_staleness": 1, "weights__sync_every": 3, "engine__kind": "birl"}, ["weights.sync_every=2"]),
        ({"rollout__max_staleness": 1, "rollout__order_window": 9}, ["x prompts = 8"]),
        ({"weights__method": "direct"}, ["engine.kind=embedded supports memory"]),
        ({"engine__kind": "vllm", "weights__method": "volume"}, ["reload | shared | checkpoint | nccl"]),
        ({"engine__kind": "vllm", "engine__sleep": True, "weights__method": "nccl"}, ["other GPUs", "set shared"]),
        ({"engine__kind": "sglang", "engine__pipeline_parallel": 2, "weights__method": "nccl"}, ["needs reload"]),
        ({"engine__attach": ["exp/trial"]}, ["engine.kind=embedded does not read it"]),
        ({"engine__kind": "birl", "engine__attach": ["localhost"]}, ["neither an address"]),
        (
            {"engine__kind": "birl", "engine__attach": ["a/b"], "weights__method": "checkpoint"},
            ["not possible with engine.attach"],
        ),
        ({"engine__kind": "vllm", "engine__python": "none"}, ["is not a Python interpreter"]),
        ({"engine__kind": "birl", "engine__sleep": True, "rollout__max_staleness": 1}, ["set only one of them"]),
        ({"weights__max_gap": 0.2}, ["the learner's own weights"]),
        ({"rollout__stop": ["\\n"]}, ["rollout.stop", "line break"]),
        ({"rollout__stop": [""]}, ["rollout.stop", "empty"]),
        ({"rollout__group_size": 1}, ["rollout.group_size=1", "algorithm.baseline=none"]),
        (
            {"rollout__group_size": 1, "algorithm__baseline": "none", "algorithm__scale_rewards": "group"},
            ["standard deviation of a group of one"],
        ),
        (
            {"algorithm__baseline": "batch", "algorithm__scale_rewards": "group"},
            ["algorithm.baseline=batch", "algorithm.scale_rewards=batch"],
        ),
        ({"algorithm__surrogate": "reinforce", "algorithm__updates_per_batch": 2}, ["has no importance ratio"]),
        (
            {"algorithm__surrogate": "online_dpo", "algorithm__denominator": "sequence"},
            ["belong together", "algorithm=online_dpo"],
        ),
        ({"algorithm__dual_clip": 0.5}, ["above 1"]),
        ({"algorithm__advantage": "pass_at_k", "algorithm__pass_k": 8}, ["one set of k answers"]),
        ({"algorithm__advantage": "gae", "algorithm__baseline": "none"}, ["algorithm.advantage=gae does not read it"]),
        ({"algorithm__advantage": "zero"}, ["has no gradient without algorithm.teacher"]),
        (
            {"algorithm__teacher": "http://x/v1/completions", "algorithm__teacher_divergence": "jsd"},
            ["algorithm.teacher_divergence=jsd", "algorithm.teacher_top_k=20", "algorithm.teacher_divergence=sampled"],
        ),
        (
            {"algorithm__teacher": "http://x/v1/completions", "rollout__temperature": 0.7},
            ["rollout.temperature=0.7", "returns log-probs at temperature 1"],
        ),
        (
            {"algorithm__teacher": "m", "algorithm__teacher_divergence": "reverse_kl", "parallel__tp": 2},
            ["algorithm.teacher_divergence=reverse_kl", "parallel.tp=2", "parallel.fsdp"],
        ),
        ({"algorithm__teacher_divergence": "jsd"}, ["algorithm.teacher is empty"]),
        ({"algorithm__kl_target": 1.0}, ["algorithm.kl_coef=0 turns the KL penalty off"]),
        ({"algorithm__kl_target": 1.0, "algorithm__kl_coef": 0.1}, ["algorithm.kl_in=reward"]),
        ({"algorithm__kl": "k1"}, ["algorithm.kl=k1: has no effect because algorithm.kl_coef=0"]),
        ({"algorithm__kl_in": "reward"}, ["algorithm.kl_in=reward: has no effect because algorithm.kl_coef=0"]),
        ({"data__weights": [2.0]}, ["data.weights=[2]: has no effect because data.train names a single set"]),
        ({"algorithm__correction": "mask"}, ["algorithm.proximal=behaviour does not read it"]),
        ({"critic__lam": 0.5}, ["has no critic"]),
        ({"lora__alpha": 8.0}, ["lora.rank=0 trains all weights"]),
        ({"parallel__fsdp": 4, "parallel__ep": 3}, ["parallel.ep=3: must divide", "4 x 1 = 4"]),
        ({"parallel__fsdp": 2, "parallel__ep": 2, "parallel__tp": 2}, ["parallel.ep=2", "parallel.tp=2"]),
        ({"parallel__cp": 2, "learner__router_aux_coef": 0.1}, ["learner.router_aux_coef=0.1", "parallel.cp=2 splits"]),
        (
            {"algorithm__router_replay": "rollout", "engine__kind": "birl"},
            ["algorithm.router_replay=rollout", "engine.kind=birl"],
        ),
        ({"algorithm__router_replay": "rollout", "track__record": True}, ["track.record=true could not be replayed"]),
        ({"reward__functions": ["model"]}, ["reward.model=FOLDER"]),
        ({"reward__functions": ["judge"]}, ["reward.functions=judge", "reward.judge=http://localhost:8000/v1#MODEL"]),
        (
            {"reward__functions": ["judge"], "reward__judge": ["gpt"]},
            ["reward.judge=['gpt']: give the address of each judge"],
        ),
        (
            {"reward__functions": ["judge"], "reward__judge": ["http://x/v1"], "reward__judge_prompt": "none.txt"},
            ["reward.judge_prompt=none.txt", "there is no such file"],
        ),
        ({"reward__judge_tokens": 9}, ["reward.judge_tokens=9", "does not name judge"]),
        ({"reward__concurrency": 9}, ["reward.concurrency=9", "over HTTP"]),
        ({"algorithm__updates_per_batch": 9}, ["algorithm.updates_per_batch=9", "lower it to 8"]),
        ({"algorithm__dynamic_sampling": True, "algorithm__baseline": "none"}, ["algorithm.dynamic_sampling=true"]),
        ({"algorithm__dynamic_sampling": True, "algorithm__max_refill": 0.0}, ["algorithm.max_refill=0"]),
        ({"algorithm__max_refill": 2.0}, ["algorithm.dynamic_sampling is false"]),
        ({"algorithm__dynamic_sampling": True, "optimizer__schedule": "cosine"}, ["schedule=cosine", "; set steps"]),
        ({"algorithm__kl_corrected": True}, ["algorithm.kl_corrected=true", "algorithm.kl_coef"]),
        ({"algorithm__surrogate": "sapo", "algorithm__clip_high": 0.3}, ["algorithm.surrogate=sapo does not read it"]),
        ({"algorithm__overlong_penalty": 0.5}, ["algorithm.overlong_buffer=0"]),
        ({"algorithm__overlong_buffer": 256}, ["algorithm.overlong_buffer=256", "51"]),
        ({"algorithm__mask_truncated": True, "rollout__truncated": "drop"}, ["rollout.truncated=drop"]),
        ({"model__max_length": 256}, ["rollout.max_tokens=256", "no room"]),
        ({"model__max_length": 8192}, ["learner.tokens_per_microbatch=4096", "8192"]),
        ({"rollout__max_tokens": 5000}, ["learner.tokens_per_microbatch=4096", "5000"]),
        (
            {"parallel__cp": 2, "model__max_length": 9001},
            ["learner.tokens_per_microbatch=4096 x parallel.cp=2 (8192 tokens)", "9001", "per_microbatch=4501"],
        ),
        ({"parallel__tp": 2, "model__max_length": 9001}, ["_microbatch=4096 x parallel.tp=2 (8192 tokens)", "=4501"]),
        (
            {"parallel__tp": 2, "parallel__sequence": False, "model__max_length": 9001},
            ["learner.tokens_per_microbatch=4096: the longest", "9001"],
        ),
        ({"parallel__context": "ulysses"}, ["parallel.context=ulysses: has no effect because parallel.cp=1"]),
        ({"model__max_length": 512, "data__max_prompt_tokens": 300}, ["lower it to 256"]),
        ({"model__path": " "}, ["model.path is empty"]),
        ({"model__path": "none.gguf"}, ["no such file"]),
        ({"model__chat_template": "none.jinja"}, ["model.chat_template=none.jinja"]),
        ({"env__kind": ""}, ["env.kind is empty"]),
        ({"env__max_turns": 2}, ["single_turn has a single turn"]),
        ({"env__options": {"low": "1"}}, ["env.low", "single_turn has no such key"]),
        ({"env__kind": "my_env.py"}, ["env.kind=my_env.py:MyEnv"]),
        ({"env__kind": "elsewhere.py:E"}, ["there is no file elsewhere.py"]),
        ({"env__kind": "a:b c"}, ["package.module:NAME"]),
        ({"reward__functions": ["maths"]}, ["Did you mean math?"]),
        ({"reward__functions": ["none.py:score"]}, ["no file none.py"]),
        ({"reward__functions": ["score.py"]}, ["score.py:my_function"]),
        ({"reward__functions": ["math", "math"]}, ["twice"]),
        ({"reward__weights": [1.0, 1.0]}, ["2 weights for 1 functions"]),
        ({"reward__weights": [0.0]}, ["every reward would be 0"]),
        ({"reward__format_pattern": "x"}, ["reward.functions does not name format"]),
        ({"reward__format_pattern": "(", "reward__functions": ["format"]}, ["not a regular expression"]),
        ({"reward__length_target": 9}, ["reward.functions does not name length"]),
        ({**HELD_OUT, "validation__k": [1, 4]}, ["validation.samples=4"]),
        ({**HELD_OUT, "validation__k": []}, ["validation.k is empty"]),
        ({**HELD_OUT, "validation__samples": 4}, ["greedy"]),
        ({**HELD_OUT, "validation__top_p": 0.9}, ["validation.temperature=0 is greedy"]),
        ({"optimizer__min_lr_ratio": 0.1}, ["optimizer.schedule=constant"]),
        ({"steps": 10, "optimizer__warmup_steps": 10}, ["only 10 optimizer steps"]),
        ({"steps": 10, "epochs": 2}, ["epochs=2", "steps=10"]),
        ({"resume": "atuo"}, ["resume=atuo", "Did you mean auto?"]),
        ({"track__wandb": "ofline"}, ["Did you mean offline?"]),
        ({"model__device": ""}, ["model.device="]),
        ({"engine__kind": "vllm", "engine__attach": ["http://[::1"]}, ["engine.attach: 'http://[::1'", "an address"]),
        ({"reward__functions": ["model"], "reward__model": "http://a:99999"}, ["reward.model: 'http://a:99999'"]),
        ({"reward__functions": ["judge"], "reward__judge": ["http:///v1#x"]}, ["reward.judge: 'http:///v1#x'"]),
        ({"env__mcp": ["http://a b/mcp"]}, ["env.mcp: 'http://a b/mcp'"]),
        ({"algorithm__teacher": "http://[::1"}, ["algorithm.teacher: 'http://[::1'"]),
        ({"algorithm__teachers": ["a=http://[::1"]}, ["algorithm.teachers: 'http://[::1'"]),
        ({"checkpoint__store": "s3://"}, ["checkpoint.store=s3://", "s3://bucket/prefix"]),
        ({"run": "/"}, ["run=/", "root of the file system"]),
        ({"model__dtype": "bfloat16,float32"}, ["--multirun"]),
    ],
)
def test_combinations(values: dict[str, object], parts: list[str]):
    found = problems(config(**values))
    assert len(found) == 1, found
    for part in parts:
        assert part in found[0]


@pytest.mark.parametrize("name", ["ppo", "rloo", "reinforce_pp"])
def test_a_preset_may_stay_without_its_kl_penalty(name: str):
    assert load(RL, ["data.train=x", f"algorithm={name}", "algorithm.kl_coef=0"]).algorithm.kl == "k1"


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio", "swanlab"])
def test_a_tracker_without_its_package(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, name, None)
    (found,) = problems(config(**{f"track__{name}": "offline"}))
    assert f"{name} is not installed; pip install 'birl[{name}]', or track.{name}=off" in found


def test_an_option_that_evaluation_would_ignore_is_refused():
    assert "data.validation=[a.jsonl]" in problems(Eval(data=Data(train=["a.jsonl"])))[0]
    for values in ({"data__split": "x"}, {"data__shuffle": False}, {"validation__every": 3}, {"data__max_samples": 3}):
        assert "does not train" in problems(evaluation(**values))[0]


def test_existing_places_pass(tmp_path: Path):
    (tmp_path / "r.py").write_text("")
    (tmp_path / "t.jinja").write_text("")
    good = config(resume=str(tmp_path), run=str(tmp_path), model__chat_template=str(tmp_path / "t.jinja"))
    good.reward.functions = [f"{tmp_path}/r.py:score", "package.module:score"]
    assert problems(good) == []
    assert "is a file" in problems(config(run=str(tmp_path / "r.py")))[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"parallel__cp": 0}, "parallel.cp=0: must be at least 1"),
        ({"rollout__prompts": 0}, "rollout.prompts=0: must be at least 1."),
        ({"model__max_length": -1}, "model.max_length=-1: must be at least 0."),
        ({"threads": 10**6}, "threads=1000000: must be at least 0 and at most 1024."),
        ({"steps": 10**20}, "steps=100000000000000000000: must be at most 2147483647."),
        ({"env__timeout": 1e30}, "env.timeout=1e+30: must be more than 0 and at most 1e+07."),
        ({"run": " "}, "is not a valid folder name"),
        ({"resume": ""}, "resume is empty"),
    ],
)
def test_a_value_that_cannot_be_is_one_problem_not_several(words: dict[str, object], said: str):
    with pytest.raises(BirlError) as error:
        check(config(**words))
    assert said in str(error.value) and len(str(error.value).splitlines()) == 1, error.value


def test_all_problems_come_at_once():
    with pytest.raises(BirlError) as error:
        check(config(rollout__top_k=10**6, optimizer__schedule="linaer", seed=-1))
    text = str(error.value)
    assert len(text.splitlines()) == 3 and "Did you mean linear?" in text


def test_problems_do_not_change_the_configuration():
    one = config()
    before = flatten(one)
    problems(one)
    assert flatten(one) == before


def test_did_you_mean_says_nothing_when_nothing_is_close():
    assert did_you_mean("zzzz", ["grpo"]) == ""
    assert did_you_mean("nosuch", ["search", "guess_number", "countdown"]) == ""
    assert did_you_mean("serch", ["search", "guess_number"]) == " Did you mean search?"
