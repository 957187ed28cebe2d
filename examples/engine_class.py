"""An engine of your own: transformers samples, token by token. It shows the engine protocol, and is slow.

birl rl data.train=my.jsonl engine.kind=examples/engine_class.py:Transformers model.dtype=float32
"""

from copy import deepcopy

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from birl.types import Completion, SamplingParams, Stop, Update


class Transformers:
    def __init__(self, model, context, end_ids):
        """Arguments, by name: model (a folder), address, number, dtype, device, context, end_ids, arguments."""
        self.context, self.end_ids, self.version = context, end_ids, 0
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval()

    def load(self, update: Update):  # plain functions run in a thread, async ones in the event loop
        model = deepcopy(self.model)  # running answers continue with the old one
        model.load_state_dict(load_file(f"{update.folder}/model.safetensors"), strict=False)  # a tied head is left out
        self.model, self.version = model, update.version

    @torch.no_grad()
    def generate(self, prompt_ids: tuple[int, ...], params: SamplingParams, session: str = "") -> Completion:
        model, version = self.model, self.version  # the same from the first token to the last
        random = torch.Generator()
        random.manual_seed(params.seed) if params.seed is not None else random.seed()
        tokens, logprobs, stop = [], [], Stop.LENGTH
        ends = {*params.stop_ids, *(() if params.ignore_eos else self.end_ids)}
        ids, cache = torch.tensor([prompt_ids]), None
        while len(tokens) < params.max_tokens and len(prompt_ids) + len(tokens) < self.context:
            out = model(ids, past_key_values=cache, use_cache=True)
            logp = (out.logits[0, -1].float() / (params.temperature or 1.0)).log_softmax(-1)
            if len(tokens) < len(params.forced):  # given tokens are scored, not drawn
                token = params.forced[len(tokens)]
            elif params.temperature == 0:
                token = int(logp.argmax())
            else:
                token = int(torch.multinomial(logp.exp(), 1, generator=random))
            tokens.append(token)
            logprobs.append(float(logp[token]))
            ids, cache = torch.tensor([[token]]), out.past_key_values
            if token in ends:
                stop = Stop.STOP
                break
        versions = (version,) * len(tokens)
        return Completion.of(tokens, logprobs, versions, stop)
