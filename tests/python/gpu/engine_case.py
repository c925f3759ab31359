"""A small model for the engine on a GPU, its tokens, and one step on them."""

from __future__ import annotations

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import oomb

PAGE, CHUNK, TOKENS, VOCABULARY = 64, 256, 1500, 512


def make_model(dtype: torch.dtype, head_dim: int = 64, device: str = "cuda") -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=7 * head_dim,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=7,
        num_key_value_heads=1,
        head_dim=head_dim,
        max_position_embeddings=4096,
    )
    return Qwen2ForCausalLM(config).to(device=device, dtype=dtype)


def make_pair() -> tuple[Qwen2ForCausalLM, Qwen2ForCausalLM]:
    """A model in bf16 with a vocabulary that the loss cuts, and its weights in fp32."""
    config = Qwen2Config(
        vocab_size=5000,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).to("cuda", torch.bfloat16)
    exact = Qwen2ForCausalLM(config).to("cuda", torch.float32)
    exact.load_state_dict(model.state_dict())
    return model, exact


def tokens(batch: int = 1, device: str = "cuda") -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY, (batch, TOKENS), generator=generator).to(device)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def chunked(
    model: Qwen2ForCausalLM, ids: torch.Tensor, **settings: object
) -> tuple[oomb.Step, dict[str, torch.Tensor]]:
    model.zero_grad()
    config = oomb.Config(chunk_size=CHUNK, page_size=PAGE, **settings)  # type: ignore[arg-type]
    with oomb.Engine(model, config) as engine:
        step = engine.forward_backward(ids, ids)
    return step, gradients(model)
