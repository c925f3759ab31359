"""Weights before training: a model that begins with the rudiments of looking a word up.

To answer, a model must find the place of a name and copy what follows it. Heads that do so form
late and at a stroke when training begins from noise: a model of two layers had none after thousands
of steps, and without them nothing can be lost or kept at a greater length. So two heads are set:

    layer 0, head 0   attends to the token before, by its place alone, and writes who that was
    layer 1, head 0   compares the word at hand with what those wrote, and copies the word there

    … FACT name value value …            … ASK name →
                │     ▲ "after name"               │
                └─────┘                            └── compared with "after name": copies value

The comparison stands in those dimensions of RoPE that turn less than a radian over the longest
sequence, so it does not depend on the distance. All other weights are noise, and all are trained.
The idea of such a start is that of mimetic initialization (Trockman and Kolter, arXiv 2305.09828).
"""

from __future__ import annotations

import torch
from transformers import Qwen2ForCausalLM

from .tasks import FACT as BYTES

_BRANCHES = 0.02  # of what a branch of a layer adds, beside an embedding
_BEFORE = 8.0  # biases of the head that attends to the token before
_MATCH = 2.0  # of the head that compares
_COPY = 8.0  # of what it copies: more than the word at hand, which would else be foretold again


@torch.no_grad()
def set_heads(model: Qwen2ForCausalLM, theta: float, longest: int) -> None:
    """Sets the two heads, in place. ``longest``: tokens up to which a match ignores distance."""
    before, match = (layer.self_attn for layer in model.model.layers[:2])
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(_BRANCHES)
        layer.mlp.down_proj.weight.mul_(_BRANCHES)
    width = before.head_dim
    who, earlier = slice(width), slice(width, 2 * width)
    model.model.embed_tokens.weight[:BYTES, who] = 0
    model.model.embed_tokens.weight[:, earlier] = 0
    turns = theta ** (-torch.arange(width // 2) / (width // 2))  # radians a token
    here = _BEFORE * turns**0.25
    for projection in (before.q_proj, before.k_proj):
        projection.weight[:width] *= 0.1
    before.q_proj.bias[:width] = torch.cat([here, torch.zeros_like(here)])
    before.k_proj.bias[:width] = torch.cat([here * turns.cos(), here * turns.sin()])
    still = (turns * longest < 1).float().repeat(2)[:, None]
    before.v_proj.weight[:width] = _only(who, before.v_proj.weight[:width])
    first = model.model.layers[0]
    first.mlp.down_proj.weight[: 2 * width] = 0  # nothing else writes there yet
    before.o_proj.weight[: 2 * width] = 0
    before.o_proj.weight[:, :width] = 0
    before.o_proj.weight[earlier, :width] = torch.eye(width)
    group = width * (model.config.num_attention_heads // model.config.num_key_value_heads)
    match.q_proj.weight[width:group] = 0  # a list is chosen by all heads of the group
    match.q_proj.bias[width:group] = 0
    match.q_proj.weight[:width] = _MATCH * before.v_proj.weight[:width] * still
    match.k_proj.weight[:width] = 0
    match.k_proj.weight[:width, earlier] = _MATCH * torch.eye(width) * still
    match.q_proj.bias[:width] = 0
    match.k_proj.bias[:width] = 0
    match.v_proj.weight[:width] = _only(who, match.v_proj.weight[:width])
    match.o_proj.weight[:, :width] = _COPY * match.v_proj.weight[:width].T * width**-0.5


def _only(dimensions: slice, weight: torch.Tensor) -> torch.Tensor:
    """What reads no other dimensions."""
    read = torch.zeros_like(weight)
    read[:, dimensions] = weight[:, dimensions] * (weight.shape[1] / weight.shape[0]) ** 0.5
    return read
