"""What a source computes for a checkpoint, as the tests read it back."""

from __future__ import annotations

from typing import Any

from tests.parity.cases import Case

LENGTHS = (71, 38)
GREEDY_PROMPT, GREEDY_NEW = 21, 12


def expected(model: Any, case: Case, config: Any, ids: Any) -> dict[str, Any]:
    """The tensors of golden.safetensors as `tests.parity.sources` describes them; pads the rows of `ids` in place."""
    import torch

    vocab = config.vocab_size
    logits = torch.zeros(*ids.shape, vocab)
    states: list[dict[str, Any]] = []
    for row, length in enumerate(LENGTHS):
        out = model(ids[row : row + 1, :length], use_cache=True)
        logits[row, :length] = out.logits[0].float()
        states.append(_recurrent_states(out, case, config.num_hidden_layers))
        ids[row, length:] = 0
    greedy = ids[:1, :GREEDY_PROMPT]
    for _ in range(GREEDY_NEW):
        best = model(greedy, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        greedy = torch.cat([greedy, best], 1)
    stacked = {key: torch.cat([state[key] for state in states]) for key in states[0]}
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    return {"ids": ids.int(), "lengths": lengths, "logits": logits, "greedy": greedy[0].int(), **stacked}


def _recurrent_states(out: Any, case: Case, layers: int) -> dict[str, Any]:
    found, entry = {}, 0  # of mlxlin's state, which has two entries for a layer with two mixers
    for index in range(layers):
        if case.source == "fla":
            state = out.past_key_values[index]["recurrent_state"]
            state = state[0] if isinstance(state, (tuple, list)) else state
        else:
            state = _transformers_state(out.cache, index)
        if state is not None:
            found[f"layers.{entry}.S"] = (state if case.v_first else state.transpose(-1, -2)).float().contiguous()
        entry += 2 if case.model == "FalconH1" else 1
    return found


def _transformers_state(cache: Any, index: int) -> Any:
    """The recurrent matrix of a layer, None where it attends."""
    if hasattr(cache, "linear_cache"):  # MiniMax's, with an empty list where a layer attends
        return next((state for state in cache.linear_cache[index : index + 1] if len(state)), None)
    layer = cache.layers[index]
    return layer.recurrent_states[0] if hasattr(layer, "recurrent_states") else None
