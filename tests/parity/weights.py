"""Random weights under which a correct float32 program can be told from a wrong one."""

from __future__ import annotations

from typing import Any

# How far logits may move when the embeddings move by float32's rounding. Random weights are drawn again until they move
# less: a norm of a nearly vanishing vector, or two experts that score alike, make two correct float32 programs differ.
WELL_CONDITIONED, DRAWS = 1e-5, 100

# Projections whose outputs are added to the residual.
_OUTPUTS = (
    "o_proj.weight",
    "out_proj.weight",
    "down_proj.weight",
    "experts.down_proj",
    "w2.weight",
    "output_linear.weight",
)


def randomise(model: Any, ids: Any) -> float:
    """Give a torch model random weights, and return how sensitive its logits for `ids` are under them."""
    initial = {key: value.clone() for key, value in model.state_dict().items()}
    sensitivity, weights = _drawn(model, initial, ids)
    for _ in range(DRAWS):
        if sensitivity < WELL_CONDITIONED:
            break
        sensitivity, weights = min((sensitivity, weights), _drawn(model, initial, ids), key=lambda drawn: drawn[0])
    model.load_state_dict(weights)
    return sensitivity


def _drawn(model: Any, initial: dict[str, Any], ids: Any) -> tuple[float, dict[str, Any]]:
    """Random weights and how sensitive the logits are under them."""
    model.load_state_dict(initial)
    _draw(model)
    return _sensitivity(model, ids), {key: value.clone() for key, value in model.state_dict().items()}


def _draw(model: Any) -> None:
    """Weights as random as possible with signals of order one; no parameter keeps its initial value."""
    import torch

    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.copy_(torch.randn(buffer.shape) * 0.1)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape)
        with torch.no_grad():
            if name.endswith(("A_log", "dt_bias")):  # states that last for tens of tokens, as in trained models
                parameter.copy_(noise * 0.6 - 1.5)
            elif name.endswith(("norm.weight", "lower_bounds")) or parameter.ndim < 2:
                parameter.add_(noise * 0.3)
            else:
                # Parts that add to the residual stay below it, else rounding errors grow from layer to layer.
                gain = 0.1 if name.endswith(_OUTPUTS) else 1.2
                parameter.copy_(noise * gain / parameter.shape[-1] ** 0.5)


def _sensitivity(model: Any, ids: Any) -> float:
    """Largest change of a logit when every embedding changes by one part in ten million."""
    import torch

    embedding = model.get_input_embeddings().weight
    before = embedding.detach().clone()
    with torch.no_grad():
        plain = model(ids, use_cache=False).logits
        embedding.mul_(1 + 1e-7 * torch.randn(before.shape))
        moved = model(ids, use_cache=False).logits
        embedding.copy_(before)
    return float((moved - plain).abs().max())
