"""birl: reinforcement-learning post-training for language models.

Importing this package is cheap: heavy packages (torch, transformers) are loaded only when they are used.
"""

import os
from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["BirlError", "DPOTrainer", "GRPOTrainer", "RewardTrainer", "SFTTrainer", "Trainer", "__version__"]

# libgomp reads this once, when torch is imported. Two threads that spin for about a millisecond are as fast as they can
# be on a quiet machine (half as fast with a tenth of that), and yield the core if others need it.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from birl.errors import BirlError

if TYPE_CHECKING:
    from birl.trainer import DPOTrainer, GRPOTrainer, RewardTrainer, SFTTrainer, Trainer

# Names of trainers and configs in other packages, and their equivalents here.
ELSEWHERE = {
    "MRLTrainer": "birl.Trainer takes the same parameters",
    "PPOTrainer": 'birl.Trainer(overrides={"algorithm": "ppo"})',
    "RLOOTrainer": 'birl.Trainer(overrides={"algorithm": "rloo"})',
    "OnlineDPOTrainer": 'birl.Trainer(overrides={"algorithm": "online_dpo"})',
    "KTOTrainer": 'birl.DPOTrainer(loss_type="kto"), or `birl dpo preference.loss=kto`',
    "ORPOTrainer": 'birl.DPOTrainer(loss_type="orpo"), or `birl dpo preference.loss=orpo`',
    "CPOTrainer": 'birl.DPOTrainer(loss_type="simpo"), or `birl dpo preference.loss=simpo`',
    "GKDTrainer": 'birl.Trainer(overrides={"algorithm": "distill"})',
    "TrlParser": "a command takes key=value words and YAML files, as in `birl rl FILE.yaml optimizer.lr=1e-6`",
    "ScriptArguments": "data sets are train_dataset= and eval_dataset= of the trainers, or data.train of a command",
    "get_peft_config": "lora_r and lora_alpha are parameters of the trainers",
}
CONFIGS = (
    "its names are parameters of the trainers, as in birl.Trainer(num_generations=8); args= takes the object itself"
)


def __getattr__(name: str) -> object:
    if name in __all__:
        from birl import trainer

        return getattr(trainer, name)
    if name in ELSEWHERE or name.endswith("Config"):
        raise ImportError(f"birl has no {name}: {ELSEWHERE.get(name, CONFIGS)} (docs/from_trl.md).")
    if name.endswith("Trainer"):
        raise ImportError(f"birl has no {name}: {', '.join(n for n in __all__ if 'Trainer' in n)} (docs/from_trl.md).")
    raise AttributeError(f"module 'birl' has no attribute {name!r}")
