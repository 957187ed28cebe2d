"""Served teachers of on-policy distillation: OpenAI endpoints of vLLM or `birl serve`."""

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from birl.data.pack import Batch
from birl.errors import BirlError
from birl.rewards.requests import AGAIN, ATTEMPTS, pause, seconds
from birl.types import Sample

AT_ONCE = 8  # concurrent requests
SILENT: dict[str, Any] = {"echo": True, "max_tokens": 0}  # no answer: the sample may be as long as the context
LEAST = 1e-9  # minimum probability of the unlisted tokens: listed log-probs are rounded
TIMEOUT = 300.0  # timeout of a request [s]
LONGEST = 30.0  # maximum wait between two attempts, whatever the server requests [s]


class ServedTeachers:
    """Teachers of a run by name; each scores its own samples."""

    def __init__(self, addresses: Mapping[str, str], vocab: int, text: Callable[[int], str] | None = None) -> None:
        self.each = {name: ServedTeacher(address, vocab, text) for name, address in addresses.items()}

    def __call__(self, batches: Sequence[Batch], samples: Sequence[Sample]) -> list[Tensor]:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(lambda s: self.each[s.teacher].logprobs(s), samples))

    def top_logprobs(self, samples: Sequence[Sample], k: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """`Sample.likely` of each sample, at temperature 1."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(lambda s: self.each[s.teacher].top_logprobs(s, k), samples))


class ServedTeacher:
    """`algorithm.teacher=http://host:port/v1/completions`, with the model's name after a `#` if the server has several.
    Sends tokens and receives log-probs; the server must have the policy's own vocabulary.

    Requests `prompt_logprobs`, with BIRL_TOKEN if it is set; `vocab`: size of the learner's vocabulary, which the
    server's must not exceed; `text`: text of a token, which must be the same on the server. Raises `BirlError` with the
    server's message after several failed attempts, or if another cannot help.
    """

    def __init__(self, address: str, vocab: int, text: Callable[[int], str] | None = None) -> None:
        (self.address, _, self.model), self.vocab, self.text = address.partition("#"), vocab, text
        self.alike: set[str] = set()  # tokens with the same text on both sides

    def logprobs(self, sample: Sample) -> Tensor:
        """Log-probs of the trained tokens, at temperature 1."""
        each = [entry[token]["logprob"] for token, entry in self._places(sample, 0)]
        return torch.tensor(each, dtype=torch.float32)

    def top_logprobs(self, sample: Sample, k: int) -> tuple[np.ndarray, np.ndarray]:
        places = [sorted(entry.items(), key=lambda item: item[1]["rank"])[:k] for _, entry in self._places(sample, k)]
        ids = np.array([[int(token) for token, _ in place] for place in places], np.int64).reshape(-1, k)
        named = np.array([[about["logprob"] for _, about in place] for place in places], np.float64).reshape(-1, k)
        if ids.size and ids.max() >= self.vocab:
            raise BirlError(
                f"algorithm.teacher={self.address}: has token {ids.max()}, but the policy has {self.vocab} tokens. "
                "Serve a model of the same family."
            )
        rest = np.log(np.maximum(1 - np.exp(named).sum(1, keepdims=True), LEAST))
        return ids, np.concatenate([named, rest], 1).astype(np.float32)

    def _places(self, sample: Sample, k: int) -> list[tuple[str, dict[str, Any]]]:
        """Each trained token, with the server's entry for it and for its k most likely tokens."""
        result = self._ask({"prompt": sample.tokens.tolist(), **SILENT, "prompt_logprobs": k})
        try:
            told = zip(result["choices"][0]["prompt_logprobs"], sample.tokens.tolist(), sample.mask, strict=True)
            places = [(str(token), entry) for entry, token, trained in told if trained]
            if not all(token in entry and len(entry) >= k for token, entry in places):
                raise KeyError("a token, or as many tokens as were asked for")
            for token, entry in places:
                self._compare(token, entry[token])
            return places
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise BirlError(
                f"algorithm.teacher={self.address}: gave no prompt_logprobs of these tokens ({type(error).__name__}: "
                f"{error}): {json.dumps(result)[:200]}. It must be vLLM or `birl serve`, with the policy's vocabulary."
            ) from error

    def _compare(self, token: str, entry: Mapping[str, Any]) -> None:
        """Raise `BirlError` for a token with another text on the server. Only ASCII letters and digits are compared, as
        servers decode other pieces differently."""
        if self.text is None or token in self.alike:
            return
        own, theirs = self.text(int(token)).strip(), entry.get("decoded_token")
        if isinstance(theirs, str) and own.isascii() and own.isalnum() and theirs.strip() != own:
            raise BirlError(
                f"algorithm.teacher={self.address}: has another vocabulary than the policy: "
                f"token {token} is {theirs!r:.80} there, and {own!r} here. Serve a model of the same "
                "family."
            )
        self.alike.add(token)

    def _ask(self, body: dict[str, Any]) -> Any:
        content = json.dumps(body | ({"model": self.model} if self.model else {})).encode()
        token = os.environ.get("BIRL_TOKEN", "")
        own = {"Authorization": f"Bearer {token}"} if token else {}
        request = urllib.request.Request(self.address, content, {"Content-Type": "application/json", **own})
        for attempt in count(1):
            again, wait = attempt < ATTEMPTS, 0.0
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
                    return json.load(reply)
            except urllib.error.HTTPError as error:
                if not again or error.code not in AGAIN:
                    why = error.read().decode(errors="replace")[:300]
                    raise BirlError(f"algorithm.teacher={self.address}: status {error.code}: {why}") from error
                wait = seconds(error.headers.get("retry-after", ""))
            except OSError as error:
                if not again or isinstance(getattr(error, "reason", error), TimeoutError):  # it took long enough
                    raise BirlError(f"algorithm.teacher={self.address}: cannot be reached ({error}).") from error
            except (HTTPException, ValueError) as error:
                if not again:
                    why = f"its answer is cut, or no JSON ({error!r})"
                    raise BirlError(f"algorithm.teacher={self.address}: {why}.") from error
            time.sleep(min(pause(attempt - 1, wait), LONGEST))
        raise AssertionError("the last attempt returns or raises")
