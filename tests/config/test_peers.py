"""Words of other systems: each is answered with the key that does it, or with the reason why there is none."""

import pytest

from birl.cli import main
from birl.config import peers
from birl.config.help import render
from birl.config.keys import documentation
from birl.config.nearest import nearest_keys, suggest
from birl.config.schema import COMMANDS, DPO, RL, SFT

# The keys that the systems' own examples and first pages set, and what each is here; None: no key, but a reason.
USUAL: dict[str, dict[str, str | None]] = {
    "verl": {
        "algorithm.adv_estimator": "algorithm.advantage",
        "algorithm.norm_adv_by_std_in_grpo": "algorithm.scale_rewards",
        "data.train_files": "data.train",
        "data.val_files": "data.validation",
        "data.train_batch_size": "rollout.prompts",
        "data.max_prompt_length": "data.max_prompt_tokens",
        "data.max_response_length": "rollout.max_tokens",
        "data.truncation": None,
        "data.filter_overlong_prompts": None,
        "actor_rollout_ref.model.path": "model.path",
        "actor_rollout_ref.model.use_remove_padding": None,
        "actor.optim.lr": "optimizer.lr",
        "rollout.n": "rollout.group_size",
        "actor_rollout_ref.actor.ppo_mini_batch_size": "algorithm.updates_per_batch",
        "save_freq": "checkpoint.every",
        "actor_rollout_ref.actor.use_kl_loss": "algorithm.kl_in",
        "use_kl_loss": "algorithm.kl_in",
        "trainer.nnodes": "parallel.ddp",
        "actor_rollout_ref.actor.kl_loss_coef": "algorithm.kl_coef",
        "trainer.test_freq": "validation.every",
        "actor_rollout_ref.actor.kl_loss_type": "algorithm.kl",
        "n_gpus_per_node": "parallel.fsdp",
        "actor_rollout_ref.actor.entropy_coeff": "algorithm.entropy_coef",
        "trainer.total_epochs": "epochs",
        "actor_rollout_ref.rollout.gpu_memory_utilization": "engine.memory_fraction",
        "trainer.project_name": "run",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": "engine.tensor_parallel",
        "trainer.critic_warmup": "critic.freeze_steps",
        "actor_rollout_ref.rollout.name": "engine.kind",
        "trainer.logger": "track.wandb",
        "trainer.val_before_train": "validation.at_start",
        "actor_rollout_ref.actor.optim.clip_grad": "optimizer.max_grad_norm",
        "critic.optim.weight_decay": "optimizer.weight_decay",
        "actor_rollout_ref.ref.fsdp_config.param_offload": "optimizer.offload",
        "actor_rollout_ref.rollout.profiler.tool_config.npu.level": "track.trace",
        "actor_rollout_ref.actor.fsdp_config.qat.group_size": None,
        "ray_kwargs.ray_init.num_cpus": None,
        "reward_model.rollout.tensor_model_parallel_size": "reward.model",
        "actor_rollout_ref.model.lora.rank": "lora.rank",
    },
    "AReaL": {
        "train_dataset.path": "data.train",
        "valid_dataset.path": "data.validation",
        "train_dataset.batch_size": "rollout.prompts",
        "gconfig.n_samples": "rollout.group_size",
        "gconfig.max_new_tokens": "rollout.max_tokens",
        "gconfig.temperature": "rollout.temperature",
        "gconfig.greedy": "rollout.temperature",
        "actor.path": "model.path",
        "actor.optimizer.lr": "optimizer.lr",
        "actor.optimizer.warmup_steps_proportion": "optimizer.warmup_steps",
        "actor.eps_clip": "algorithm.clip_low",
        "actor.kl_ctl": "algorithm.kl_coef",
        "actor.ppo_n_minibatches": "algorithm.updates_per_batch",
        "saver.freq_steps": "checkpoint.every",
        "actor.use_decoupled_loss": "algorithm.proximal",
        "rollout.max_head_offpolicyness": "rollout.max_staleness",
        "actor.mb_spec.max_tokens_per_mb": "learner.tokens_per_microbatch",
        "allocation_mode": "engine.kind",
        "experiment_name": "run",
        "total_train_epochs": "epochs",
        "evaluator.freq_epochs": "validation.every",
        "recover.mode": "resume",
        "stats_logger.wandb.mode": "track.wandb",
        "sglang.mem_fraction_static": "engine.memory_fraction",
        "actor.reward_scaling": "reward.weights",
        "critic.optimizer.eps": "optimizer.eps",
        "teacher.train.mb_spec.max_tokens_per_mb": "learner.tokens_per_microbatch",
        "rollout.scheduling_spec.cpu": None,
        "sglang.max_lora_rank": "engine.arguments",
        "vllm.enable_lora": "engine.arguments",
    },
    "OpenRLHF": {
        "--pretrain": "model.path",
        "--reward-pretrain": "reward.model",
        "--remote_rm_url": "reward.functions",
        "--prompt_data": "data.train",
        "--input_key": "data.prompt_column",
        "--label_key": "data.answer_column",
        "--apply_chat_template": "data.apply_chat_template",
        "--rollout_batch_size": "rollout.prompts",
        "--n_samples_per_prompt": "rollout.group_size",
        "--train_batch_size": "rollout.prompts",
        "--micro_train_batch_size": "learner.tokens_per_microbatch",
        "--generate_max_len": "rollout.max_tokens",
        "--max_epochs": "algorithm.passes",
        "--prompt_max_len": "data.max_prompt_tokens",
        "--actor_learning_rate": "optimizer.lr",
        "--critic_learning_rate": "critic.lr",
        "--init_kl_coef": "algorithm.kl_coef",
        "--eps_clip": "algorithm.clip_low",
        "--advantage_estimator": "algorithm.advantage",
        "--gamma": "critic.gamma",
        "--lambd": "critic.lam",
        "--use_kl_loss": "algorithm.kl_in",
        "--kl_estimator": "algorithm.kl",
        "--zero_stage": "parallel.fsdp",
        "--adam_offload": "optimizer.offload",
        "--gradient_checkpointing": "learner.gradient_checkpointing",
        "--packing_samples": None,
        "--flash_attn": None,
        "--vllm_num_engines": "engine.count",
        "--colocate_all_models": "engine.kind",
        "--vllm_tensor_parallel_size": "engine.tensor_parallel",
        "--save_path": "run",
        "--save_steps": "checkpoint.every",
        "--bf16": "model.dtype",
        "--actor_num_gpus_per_node": "parallel.fsdp",
        "--use_wandb": "track.wandb",
        "--lora_rank": "lora.rank",
        "--lora-alpha": "lora.alpha",
        "--algo.kl.init_coef": "algorithm.kl_coef",
        "--ds.lora.alpha": "lora.alpha",
        "--l2": "optimizer.weight_decay",
    },
    "RL2": {
        "kl.type": "algorithm.kl_in",
        "kl.reward_estimator": "algorithm.kl",
        "actor.avg_level": "algorithm.denominator",
        "adv.estimator": "algorithm.advantage",
        "adv.norm_var": "algorithm.scale_rewards",
        "actor.rollout.env_path": "env.kind",
        "rollout.train.prompts_per_rollout": "rollout.prompts",
        "actor.model_name": "model.path",
        "trainer.use_wandb": "track.wandb",
    },
    "TRL": {
        "lr_scheduler_type": "optimizer.schedule",
        "use_vllm": "engine.kind",
        "log_completions": "track.rollouts",
        "peft_config": "lora.rank",
        "num_iterations": "algorithm.passes",
        "max_completion_length": "rollout.max_tokens",
        "num_train_epochs": "epochs",
        "per_device_train_batch_size": "rollout.prompts",
        "callbacks": None,
        "processing_class": "model.path",
        "tools": "env.kind",
        "environment_factory": "env.kind",
        "warmup_ratio": "optimizer.warmup_steps",
        "num_generation": "rollout.group_size",
        "max_prompt_length": "data.max_prompt_tokens",
        "evaluation_strategy": "validation.every",
        "neftune_noise_alpha": None,
        "use_cache": None,
        "label_smoothing_factor": None,
        "lora_r": "lora.rank",
        "lora_dropout": None,
        "load_in_4bit": "lora.quantize",
        "model_name_or_path": "model.path",
        "dataset_name": "data.train",
        "num_ppo_epochs": "algorithm.passes",
        "learning_rat": "optimizer.lr",
        "temprature": "rollout.temperature",
        "optimzer.lrr": "optimizer.lr",
    },
    "EasyRL": {
        "paths.train_data": "data.train",
        "actor.rollout_n": "rollout.group_size",
        "training.kl_loss_coeff": "algorithm.kl_coef",
    },
    "MRL": {"max_model_len": "model.max_length", "use_lora": "lora.rank", "num_rollout_workers": "engine.count"},
    "AReaLite": {"trainer.ppo.collector.agent.type": "env.kind", "exp_ctrl.total_train_epochs": "epochs"},
    "Brawl": {"policy.k": "rollout.group_size", "default_hdfs_dir": "checkpoint.store"},
}


@pytest.mark.parametrize(
    ("word", "key"), [(word, key) for words in USUAL.values() for word, key in words.items()], ids=str
)
def test_usual_words_of_others_get_the_right_key(word: str, key: str | None) -> None:
    said = suggest(word, RL)
    if key is None:
        assert "word, without a key here: " in said and not nearest_keys(word, RL)
    else:
        assert key in nearest_keys(word, RL) and key in said.partition("(")[0]


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
