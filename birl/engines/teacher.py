"""Teachers of on-policy distillation: a frozen model here, or one behind vLLM's OpenAI endpoint."""

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any

import torch
from torch import Tensor

from birl.data.pack import Batch
from birl.errors import BirlError
from birl.types import Sample

AT_ONCE = 8  # requests
TIMEOUT = 300.0  # seconds a request may take


class ServedTeacher:
    """`algorithm.teacher=http://host:port/v1/completions`, with the model's name behind a `#` where the server has
    several. Tokens go and log-probs come; the server must read the policy's own vocabulary.

    Asks for `prompt_logprobs`, which vLLM gives. Raises `BirlError` with the server's words.
    """

    def __init__(self, address: str) -> None:
        self.address, _, self.model = address.partition("#")

    def __call__(self, batches: Sequence[Batch], samples: Sequence[Sample]) -> list[Tensor]:
        """For each sample the log-probs of its trained tokens, at temperature 1."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(self._one, samples))

    def _one(self, sample: Sample) -> Tensor:
        result = self._ask({"prompt": sample.tokens.tolist(), "max_tokens": 1, "prompt_logprobs": 0})
        try:
            places = result["choices"][0]["prompt_logprobs"]
            each = [
                entry[str(token)]["logprob"]
                for entry, token, mask in zip(places, sample.tokens.tolist(), sample.mask.tolist(), strict=True)
                if mask
            ]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise BirlError(
                f"algorithm.teacher={self.address}: gave no prompt_logprobs of these tokens ({type(error).__name__}: "
                f"{error}): {json.dumps(result)[:200]}. The server must be vLLM's, with the policy's vocabulary."
            ) from error
        return torch.tensor(each, dtype=torch.float32)

    def _ask(self, body: dict[str, Any]) -> Any:
        words = json.dumps(body | ({"model": self.model} if self.model else {})).encode()
        request = urllib.request.Request(self.address, words, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            why = error.read().decode(errors="replace")[:300]
            raise BirlError(f"algorithm.teacher={self.address}: the server says {error.code}: {why}") from error
        except OSError as error:
            raise BirlError(f"algorithm.teacher={self.address}: cannot be reached ({error}).") from error
        except (HTTPException, ValueError) as error:
            raise BirlError(f"algorithm.teacher={self.address}: its answer is cut, or no JSON ({error!r}).") from error
