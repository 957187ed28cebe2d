"""The two forward passes of generation, over the very module that is trained."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from birl.engine.kv_cache import KVCache
from birl.engine.request import Request
from birl.models.attention import Decode, Packed, Tree
from birl.models.forward import head, hidden_states
from birl.models.packed import PackedLinears


class Runner:
    """Prefill fills the cache with all of a sequence but its last token; decode runs that last token and gives the next
    one's logits. So the first answer token comes out of decode as well, and a group's prompt is computed once for all
    its members."""

    def __init__(self, model: nn.Module, prefill_tokens: int = 4096) -> None:
        self.model = model
        self.prefill_tokens = prefill_tokens
        self.packed = PackedLinears(model)
        self.cache = KVCache(**self.cache_shape(model), device=head(model).weight.device)

    @staticmethod
    def cache_shape(model: nn.Module) -> dict:
        config = model.config.get_text_config()  # pyright: ignore
        heads = config.num_attention_heads
        return {
            "layers": config.num_hidden_layers,
            "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
            "dtype": head(model).weight.dtype,
        }

    def prefill(self, requests: Sequence[Request], first_slot: int) -> None:
        """Requests go to the slots from first_slot on. Equal prompts are computed once, at most prefill_tokens in one
        pass."""
        slots: dict[tuple[int, ...], list[int]] = {}
        for i, request in enumerate(requests):
            slots.setdefault((*request.prompt, *request.tokens)[:-1], []).append(first_slot + i)
        slots.pop((), None)
        part: list[tuple[int, ...]] = []
        for sequence in slots:
            if part and sum(map(len, part)) + len(sequence) > self.prefill_tokens:
                self._prefill({s: slots[s] for s in part})
                part = []
            part.append(sequence)
        if part:
            self._prefill({s: slots[s] for s in part})

    def _prefill(self, slots: dict[tuple[int, ...], list[int]]) -> None:
        device = self.cache.keys[0].device
        targets = [torch.tensor(s, device=device) for s in slots.values()]

        def store(layer: int, keys: Tensor, values: Tensor) -> None:
            start = 0
            for sequence, target in zip(slots, targets, strict=True):
                cut = slice(start, start + len(sequence))
                start = cut.stop
                self.cache.write(layer, target, keys[:, cut], values[:, cut])

        tokens = torch.tensor([t for s in slots for t in s], device=device)
        positions = torch.tensor([i for s in slots for i in range(len(s))], device=device)
        hidden_states(self.model, tokens, positions, Packed([Tree(len(s)) for s in slots], device, store))

    def decode(self, requests: Sequence[Request]) -> Tensor:
        """Logits of each running request's next token, [B, V] float32."""
        device = self.cache.keys[0].device
        tokens = torch.tensor([r.last_token for r in requests], device=device)
        positions = torch.tensor([len(r) - 1 for r in requests], device=device)
        longest = max(len(r) for r in requests)
        layout = Decode(self.cache.keys, self.cache.values, positions, longest)
        hidden = hidden_states(self.model, tokens, positions, layout)
        return head(self.model)(hidden).float()
