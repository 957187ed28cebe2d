"""What requests and answers of SGLang's /generate are, so that tests check what birl sends to SGLang, and what their
double answers, with SGLang's own contract (sglang/api/v1/api_types.py of SGLang 0.5.23, Apache-2.0, Copyright 2023-2024
SGLang Team): all sampling parameters, and of the rest what birl sends and reads. SGLang refuses unknown sampling
parameters; it ignores other unknown keys, which are refused here, too: birl would send them in vain."""

from typing import Annotated, Any, Self

import msgspec

UInt = Annotated[int, msgspec.Meta(ge=0)]
Texts = str | list[str] | None  # one value or a list of values
Logprob = tuple[float | None, int, str | None]  # of a token, its id, its text


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    @classmethod
    def from_json_value(cls, value: Any) -> Self:
        """Raises `msgspec.ValidationError`."""
        return msgspec.convert(value, cls)


class Watermark(Strict):
    enabled: bool | None = None
    key: str | None = None
    context_window: int | None = None


class Sampling(Strict):
    max_new_tokens: int = 128
    stop: list[str] = []
    stop_token_ids: list[int] = []
    stop_regex: Texts = None
    temperature: float = 1.0
    top_p: float | None = 1.0
    top_k: int | None = 1073741824
    min_p: float | None = 0.0
    frequency_penalty: float | None = 0.0
    presence_penalty: float | None = 0.0
    repetition_penalty: float | None = 1.0
    min_new_tokens: int | None = 0
    n: int | None = 1
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = True
    no_stop_trim: bool | None = False
    stream_interval: int | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    custom_params: Any = None
    beam_width: int | None = None
    watermark: Watermark | None = None
    choice: list[str] | None = None


class GenerateRequest(Strict):
    input_ids: list[int]
    sampling_params: Sampling
    rid: str
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int = -1
    extra_key: Texts = None


class Span(Strict):
    version: str = ""
    start: int = 0
    end: int = 0


class MetaInfo(Strict):
    id: str = ""
    prompt_tokens: UInt = 0
    completion_tokens: UInt = 0
    cached_tokens: UInt = 0
    finish_reason: dict[str, Any] | None = None
    output_token_logprobs: list[Logprob] | None = None
    input_token_logprobs: list[Logprob] | None = None
    e2e_latency: float | None = None
    weight_version: str | None = None
    weight_versions: list[Span] | None = None


class GenerateResponse(Strict):
    text: str = ""
    output_ids: list[int] | None = None
    meta_info: MetaInfo | None = None
