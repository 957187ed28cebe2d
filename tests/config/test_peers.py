"""Words of other systems: each is answered with the key that does it, or with the reason why there is none."""

import pytest

from birl.cli import main
from birl.config import peers
from birl.config.help import render
from birl.config.keys import documentation
from birl.config.nearest import nearest_keys, suggest
from birl.config.schema import COMMANDS, DPO, RL, SFT

# Names that are in no table as they are: shortened, of another role or section, misspelt. None: no key, but a reason.
ALIKE: dict[str, str | None] = {
    "rollout.n": "rollout.group_size",
    "save_freq": "checkpoint.every",
    "n_gpus_per_node": "parallel.fsdp",
    "critic.optim.weight_decay": "optimizer.weight_decay",
    "actor_rollout_ref.rollout.profiler.tool_config.npu.level": "track.trace",
    "actor_rollout_ref.actor.fsdp_config.qat.group_size": None,
    "ray_kwargs.ray_init.num_cpus": None,
    "reward_model.rollout.tensor_model_parallel_size": "reward.model",
    "critic.optimizer.eps": "optimizer.eps",
    "teacher.train.mb_spec.max_tokens_per_mb": "learner.tokens_per_microbatch",
    "rollout.scheduling_spec.cpu": None,
    "sglang.max_lora_rank": "engine.arguments",
    "vllm.enable_lora": "engine.arguments",
    "--ds.lora.alpha": "lora.alpha",
    "kl.type": "algorithm.kl_in",
    "kl.reward_estimator": "algorithm.kl",
    "num_generation": "rollout.group_size",
    "num_ppo_epochs": "algorithm.passes",
    "learning_rat": "optimizer.lr",
    "temprature": "rollout.temperature",
    "optimzer.lrr": "optimizer.lr",
}


@pytest.mark.parametrize(("word", "key"), ALIKE.items(), ids=str)
def test_words_like_those_of_the_tables_get_their_key(word: str, key: str | None) -> None:
    said = suggest(word, RL)
    if key is None:
        assert "word, without a key here: " in said and not nearest_keys(word, RL)
    else:
        assert key in nearest_keys(word, RL) and key in said.partition("(")[0]


def test_each_word_of_the_tables_gets_the_keys_of_its_row() -> None:
    known = documentation(RL).keys()
    keyed = 0
    for row in peers.rows():
        for place, name in enumerate(row.names):
            keys = {row.keys[place]} if len(row.keys) == len(row.names) else set(row.keys)
            if len(peers.named(name)) > 1 or any(key.endswith(f".{name}") for key in known):
                continue  # a word of several rows, or a key's last part
            if row.keys and keys <= known:
                assert keys & set(nearest_keys(name, RL)), (name, nearest_keys(name, RL))
                keyed += 1
            elif not row.keys:
                assert "word, without a key here: " in suggest(name, RL) and not nearest_keys(name, RL), name
    assert keyed > 900  # else the loop saw too few


def test_every_key_of_the_tables_exists_and_every_row_says_something() -> None:
    known = {key for schema in COMMANDS.values() for key in documentation(schema)}
    for row in peers.rows():
        assert not set(row.keys) - known, row
        assert row.names[0] and (row.keys or row.note), row


@pytest.mark.parametrize(
    "word", ["sever.mount", "cluster_stages", "someone.setup_time", "a.b.scores", "ranking_project"]
)
def test_a_word_of_nobody_gets_no_hint(word: str) -> None:
    assert suggest(word, RL) == ""


@pytest.mark.parametrize(
    ("word", "schema", "said"),
    [
        ("ld_alpha", DPO, "without a key here: the losses are those of preference.loss"),
        ("loss_weights", DPO, "Did you mean preference.nll_coef?"),
        ("cpo_alpha", DPO, "Did you mean preference.nll_coef?"),
        ("formatting_func", SFT, "rows are read as they are (docs/data.md)"),
        ("learning_rate", RL, "(TRL's word: the default here is 1e-6)"),
        ("warmup_steps", RL, "(TRL's word: in steps; 0)"),
        ("learning_rate", SFT, "(TRL's word: the default here is 2e-05)"),
        ("lora_alpha", RL, "lora.alpha? (TRL's word: the default here is 32)"),
        ("clip_range", RL, "Did you mean algorithm.clip_low or algorithm.clip_high?"),
        ("algorithm.beta", RL, "Did you mean algorithm.kl_coef?"),
        ("lora.r", RL, "Did you mean lora.rank?"),
        ("checkpoint.save_every", RL, "Did you mean checkpoint.every?"),
        ("data.file", RL, "Did you mean data.train?"),
        ("gpus", SFT, "Did you mean parallel.fsdp or parallel.ddp?"),
        ("torch_dtype", RL, "Did you mean model.dtype?"),
        ("num_generations", SFT, "TRL's num_generations is rollout.group_size of `birl rl`."),
        ("beta", DPO, "Did you mean preference.beta?"),
        ("max_length", SFT, "Did you mean model.max_length?"),
        ("packing", SFT, "always packed"),
    ],
)
def test_words_of_another_command_name_it(word: str, schema: type, said: str) -> None:
    assert said in suggest(word, schema)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("kto", "`birl dpo preference.loss=kto`"),
        ("grpo", "`birl rl algorithm=grpo`"),
        ("ppo", "`birl rl algorithm=ppo`"),
        ("simpo", "`birl dpo preference.loss=simpo`"),
        ("reward", "`birl rm`"),
        ("vllm-serve", "`birl serve`"),
        ("train", "`birl rl`"),
        ("rll", "Did you mean rl?"),
    ],
)
def test_words_that_are_no_command(word: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "key"),
    [("num_generations", "rollout.group_size"), ("truncated", "rollout.truncated"), ("scheduler", "optimizer.schedule"),
     ("pass@k", "validation.samples"), ("eps_clip", "algorithm.clip_low"), ("kl_loss_coef", "algorithm.kl_coef")],
)  # fmt: skip
def test_help_finds_words_of_texts_and_of_others(word: str, key: str) -> None:
    assert f"{key}=" in render("rl", RL, 100, only=(word,))
