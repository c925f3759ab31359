"""Models that cannot be run exactly are refused by name, before any work."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import peft
import pytest
import torch
import transformers
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import oomb
from oomb.model.causal import check_places

from .block_models import make as make_blocks
from .models import make, of, spread_weights
from .recurrent_models import make_recurrent, nothing_rounds_to_float32
from .reference import assert_equal, chunked, ordinary, random_ids

CONFIG = oomb.Config(chunk_size=16, page_size=8)


def mamba() -> nn.Module:
    return of("Mamba")


def mamba2() -> nn.Module:
    return of("Mamba2", num_heads=12, state_size=8, n_groups=1)


def minimax() -> nn.Module:
    return of(
        "MiniMax",
        num_local_experts=2,
        num_experts_per_tok=1,
        layer_types=["full_attention", "linear_attention"],
    )


def rwkv() -> nn.Module:
    """Has no attention, and hands its state on in an argument of its own."""
    config = transformers.RwkvConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, context_length=64
    )
    return transformers.RwkvForCausalLM(config).eval()  # type: ignore[no-any-return]


def jamba() -> nn.Module:
    """In bf16, with steps so small that a state which is lost would hardly be seen."""
    model = of(
        "Jamba",
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=1,
        num_experts_per_tok=1,
        mamba_d_state=8,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    )
    with torch.no_grad():
        model.model.layers[0].mamba.dt_proj.bias.fill_(-6.9)
    return model.to(torch.bfloat16)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4
    )
    return transformers.T5ForConditionalGeneration(config).eval()  # type: ignore[no-any-return]


def encoder() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4
    )
    return transformers.BertModel(config).eval()  # type: ignore[no-any-return]


def data_parallel() -> nn.Module:
    return nn.DataParallel(make("llama"))


class DistributedDataParallel(nn.Module):
    """Stands for torch's own, whose constructor wants a process group."""

    def __init__(self) -> None:
        super().__init__()
        self.module = make("llama")


def router_jitter() -> nn.Module:
    return of("Mixtral", num_local_experts=2, num_experts_per_tok=1, router_jitter_noise=0.1)


def layerdrop() -> nn.Module:
    """In eval mode, in which it does nothing yet."""
    return of("OPT", ffn_dim=64, word_embed_proj_dim=48, layerdrop=0.1).eval()


def loss_with_a_term_of_its_own() -> nn.Module:
    return make_recurrent("bamba", z_loss_coefficient=0.1)


def prompt_tuning() -> nn.Module:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    return peft.get_peft_model(make("llama", torch.float32), config)


def prefix_tuning() -> nn.Module:
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    return peft.get_peft_model(make("llama", torch.float32), config)


def adalora() -> nn.Module:
    config = peft.AdaLoraConfig(target_modules=["q_proj"], total_step=4, task_type="CAUSAL_LM")
    return peft.get_peft_model(make("llama", torch.float32), config)


def activated_lora() -> nn.Module:
    config = peft.LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[3, 4])
    return peft.get_peft_model(make("llama", torch.float32), config)


def x_lora(tmp_path: Path) -> nn.Module:
    lora = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(make("llama", torch.float32), lora).save_pretrained(str(tmp_path))
    config = peft.XLoraConfig(
        task_type="CAUSAL_LM", hidden_size=48, adapters={"0": str(tmp_path), "1": str(tmp_path)}
    )
    return peft.get_peft_model(make("llama", torch.float32, use_cache=False), config)


def attention_dropout() -> nn.Module:
    return make("llama", attention_dropout=0.1).train()


def no_head() -> nn.Module:
    return make("llama").model  # type: ignore[no-any-return]


def without_weights() -> nn.Module:
    with torch.device("meta"):
        return make("llama", torch.float32)


def compiled() -> nn.Module:
    return torch.compile(make("llama"))  # type: ignore[no-any-return,return-value]


def layer_that_fails() -> nn.Module:
    model = make("llama")

    def forward(*_: Any, **__: Any) -> Any:
        raise RuntimeError("sizes differ")

    model.model.layers[0].self_attn.forward = forward
    return model


def wants_more_of_its_decoder() -> nn.Module:
    """A causal model that reads a part of the decoder's output that the engine does not make."""
    model = make("llama")
    decoder = model.model
    inner = decoder.forward

    def decode(*arguments: Any, **keywords: Any) -> Any:
        output = inner(*arguments, **keywords)
        output.extra = 0
        return output

    def forward(**keywords: Any) -> Any:
        output = decoder(**keywords)
        return SimpleNamespace(logits=model.lm_head(output.last_hidden_state) + output.extra)

    decoder.forward, model.forward = decode, forward
    return model


def experts_alone() -> nn.Module:
    """A layer without attention."""
    model = make("llama")
    layer = model.model.layers[1]
    layer.forward = lambda hidden_states, **_: layer.mlp(hidden_states)
    return model


def own_attention() -> nn.Module:
    """A layer that attends without transformers' interface."""
    model = make("llama")
    layer = model.model.layers[1]

    def forward(hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        q = hidden_states[:, None]
        mixed = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        return hidden_states + mixed[:, 0]

    layer.forward = forward
    return model


def test_a_layer_without_attention_is_exact() -> None:
    model, ids = experts_alone(), random_ids(1, 50)
    assert_equal(chunked(model, CONFIG, ids, ids), ordinary(model, ids, ids))


def window_of_the_mask() -> nn.Module:
    """Its attention function is not told of the window that is in the mask."""
    return of(
        "Phimoe",
        num_local_experts=2,
        sliding_window=12,
        router_jitter_noise=0.0,
        input_jitter_noise=0.0,
    )


def flash_without_window() -> nn.Module:
    """The same with an attention function that takes no mask: it would see everything."""
    model = window_of_the_mask()
    AttentionInterface.register("test_flash", sdpa_attention_forward)
    AttentionMaskInterface.register("test_flash", sdpa_mask)
    model.config._attn_implementation_internal = "test_flash"  # type: ignore[union-attr]
    return model


def test_a_window_in_the_mask_alone_is_exact() -> None:
    model, ids = window_of_the_mask().double(), random_ids(1, 60)
    model.set_experts_implementation("eager")  # type: ignore[operator]
    with nothing_rounds_to_float32():
        expected = ordinary(model, ids, ids)  # type: ignore[arg-type]
        assert_equal(chunked(model, CONFIG, ids, ids), expected)


def flash_without_blocks() -> nn.Module:
    """Blocks larger than what is tried; with smaller ones transformers refuses flash itself."""
    model = make_blocks(64)
    AttentionInterface.register("test_flash", sdpa_attention_forward)
    AttentionMaskInterface.register("test_flash", sdpa_mask)
    model.config._attn_implementation_internal = "test_flash"
    return model


def both_ways() -> nn.Module:
    return of("Gemma3", config="Gemma3TextConfig", use_bidirectional_attention=True)


def keyword_in_words() -> nn.Module:
    """An attention keyword that holds a tensor, of which nobody wants to read the values."""
    model = make("llama")
    for layer in model.model.layers:
        layer.self_attn.forward = partial(
            layer.self_attn.forward, indices=torch.zeros(1, 2, 2, dtype=torch.int64)
        )
    return model


def keyword_of_pairs() -> nn.Module:
    """An attention keyword that holds a number for each pair of tokens."""
    model = make("llama")
    attention = model.model.layers[1].self_attn
    inner = attention.forward

    def forward(hidden_states: torch.Tensor, **keywords: Any) -> Any:
        tokens = hidden_states.shape[1]
        return inner(hidden_states, **keywords, nearness=torch.zeros(1, 6, tokens, tokens))

    attention.forward = forward
    return model


def wide_heads() -> nn.Module:
    return of("Llama", head_dim=520)


def own_loss() -> nn.Module:
    model: Any = make("llama")

    def weighed(**_: Any) -> torch.Tensor:
        return torch.zeros(())

    model.loss_function = weighed
    return model  # type: ignore[no-any-return]


def of_accelerate() -> nn.Module:
    """As accelerate's mixed precision leaves a model."""
    model: Any = make("llama", torch.float32)
    state = accelerate.state
    before = state.AcceleratorState._shared_state, state.PartialState._shared_state
    state.AcceleratorState._shared_state, state.PartialState._shared_state = {}, {}
    try:
        return accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare_model(model)
    finally:
        state.AcceleratorState._shared_state, state.PartialState._shared_state = before


def default_positions() -> nn.Module:
    """Without position_ids its tokens stand at 1, 2, 3, …, behind that of padding."""
    config = transformers.RobertaConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, is_decoder=True,
        pad_token_id=0,
    )  # fmt: skip
    model = transformers.RobertaForCausalLM(config).eval()
    spread_weights(model)
    return model  # type: ignore[no-any-return]


def several_streams() -> nn.Module:
    config = transformers.MusicgenDecoderConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, ffn_dim=32
    )
    return transformers.MusicgenForCausalLM(config).eval()  # type: ignore[no-any-return]


def no_layers() -> nn.Module:
    return of("Llama", num_hidden_layers=0)


def fewer_layers() -> nn.Module:
    """Than its config says."""
    model = of("Llama")
    model.model.layers = model.model.layers[:1]
    return model


def twice() -> nn.Module:
    """A layer that calls attention two times."""
    model = make("llama")
    layer = model.model.layers[1]
    once = layer.self_attn.forward

    def forward(*arguments: Any, **keywords: Any) -> Any:
        once(*arguments, **keywords)
        return once(*arguments, **keywords)

    layer.self_attn.forward = forward
    return model


def looks_at_other_tokens() -> nn.Module:
    """A layer that mixes tokens outside attention: only the probe can see it."""
    model = make("llama")
    inner = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda x: inner(x) + x.cumsum(dim=1)
    return model


MODELS: list[tuple[Callable[[], nn.Module], str]] = [
    (mamba, r"layers\.0\.mixer \(MambaMixer\): asks its cache for the state of Mamba-1"),
    (jamba, r"layers\.0\.mamba \(JambaMambaMixer\): asks its cache for the state of Mamba-1"),
    (minimax, r"layers\.1\.self_attn \(MiniMaxLightningAttention\): asks .* lightning attention"),
    (rwkv, r"blocks\.0 \(RwkvBlock\): does not call .*\(RwkvSelfAttention\) is a recurrence"),
    (mamba2, r"layers\.0\.mixer \(Mamba2Mixer\): hands on states, but no layer calls attention"),
    (
        own_attention,
        r"layers\.1 \(LlamaDecoderLayer\): does not call .*: it computes attention by itself",
    ),
    (flash_without_window, r"layers\.0 .*: its mask is a sliding window of 12 .*does not tell"),
    (flash_without_blocks, r"layers\.0 .*: its mask shows it blocks of 64 .*is not told"),
    (both_ways, r"layers\.0 .*: its mask is neither causal, nor .*both ways"),
    (keyword_in_words, r"attention keyword indices=a tensor \[1, 2, 2\] is not supported"),
    (
        keyword_of_pairs,
        r"layer 1 \(LlamaAttention\): asks attention for nearness, a value for each pair of query "
        "and key, and the engine's attention adds nothing to their scores",
    ),
    (wide_heads, r"layers\.0 .*expected a head dim of at most 512, got 520"),
    (own_loss, r"LlamaForCausalLM: expected the loss_function of its class, got '.*weighed'"),
    (of_accelerate, r"wrapped by accelerate's mixed precision.*keep_fp32_wrapper=False"),
    (default_positions, r"RobertaModel: hidden states before .*look for positions of its own"),
    (several_streams, "MusicgenForCausalLM: expected one embedding of tokens, got ModuleList"),
    (no_layers, "LlamaModel: expected at least one decoder layer, got a config with none"),
    (fewer_layers, r"LlamaModel: expected its decoder layers .*\(2\), got layers of 1"),
    (t5, "T5ForConditionalGeneration: encoder-decoder"),
    (encoder, "BertModel"),
    (data_parallel, "DataParallel: .*distributed training"),
    (DistributedDataParallel, "DistributedDataParallel: .*distributed training"),
    (router_jitter, "jitter"),
    (layerdrop, r"OPTDecoder\): expected layerdrop 0, got 0\.1"),
    (loss_with_a_term_of_its_own, "BambaForCausalLM: expected z_loss_coefficient 0, got 0.1"),
    (prompt_tuning, "PromptTuningConfig.*prompt learning"),
    (prefix_tuning, "PrefixTuningConfig.*prompt learning"),
    (adalora, r"'default' \(AdaLoraConfig\): the loss of its orthogonality"),
    (activated_lora, r"'default' \(LoraConfig\): activation by tokens"),
    (
        attention_dropout,
        r"layer 0 \(LlamaAttention\).*attention dropout 0.1.*attention_dropout=0.0",
    ),
    (no_head, "LlamaModel"),
    (without_weights, r"embed_tokens.*device 'meta'.*oomb\.plan"),
    (compiled, r"torch\.compile; give the engine the model itself"),
    (layer_that_fails, "LlamaForCausalLM: its own forward fails on 32 tokens: sizes differ"),
    (wants_more_of_its_decoder, "LlamaForCausalLM: fails when it is run in chunks: .*extra"),
    (twice, r"layers\.1 \(LlamaDecoderLayer\).*more than once"),
    (looks_at_other_tokens, r"layers\.1 .*depend on the tokens before it, outside of attention"),
    (lambda: nn.Linear(3, 3), "expected a transformers causal language model, got Linear"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("build", "text"), MODELS, ids=lambda x: getattr(x, "__name__", None))
def test_is_refused(build: Callable[[], nn.Module], text: str) -> None:
    model = build()
    modes = [module.training for module in model.modules()]
    with pytest.raises(oomb.UnsupportedModelError, match=text):
        oomb.Engine(model, CONFIG)
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())


def test_float64_angles_of_another_layout() -> None:
    with pytest.raises(oomb.UnsupportedModelError, match="CohereRotaryEmbedding.*rope_angles"):
        oomb.Engine(make("cohere"), oomb.Config(rope_angles="float64"))


def test_adapters_that_are_mixed_by_a_classifier(tmp_path: Path) -> None:
    with pytest.raises(oomb.UnsupportedModelError, match=r"\(XLoraConfig\): its classifier"):
        oomb.Engine(x_lora(tmp_path), CONFIG)


def test_an_optimizer_fused_into_backward() -> None:
    """Its hook would see the gradient of one chunk."""
    model = make("llama")
    ids = torch.randint(1, 97, (1, 40))
    hook = model.lm_head.weight.register_post_accumulate_grad_hook(lambda _: None)
    with oomb.Engine(model, CONFIG) as engine:
        with pytest.raises(oomb.UnsupportedModelError, match="post-accumulate"):
            engine.forward_backward(ids, ids)
        hook.remove()
        engine.forward_backward(ids, ids)


def own_mask() -> nn.Module:
    config = transformers.TrOCRConfig(
        vocab_size=97, d_model=48, decoder_layers=2, decoder_attention_heads=6, decoder_ffn_dim=64
    )
    return transformers.TrOCRForCausalLM(config).eval()  # type: ignore[no-any-return]


def test_attention_that_transformers_does_not_hand_over() -> None:
    with pytest.raises(
        oomb.UnsupportedModelError, match=r"its self_attn \(TrOCRAttention\) computes attention by"
    ):
        oomb.Engine(own_mask(), CONFIG)


def test_weights_in_several_places() -> None:
    places = [("a", torch.device("cuda:0")), ("b", torch.device("cuda:1"))]
    weights: Any = [(name, SimpleNamespace(device=place)) for name, place in places]
    with pytest.raises(oomb.UnsupportedModelError, match="got cuda:0, cuda:1; load it with"):
        check_places(weights)
    check_places(weights[:1])


def test_dropout_of_adapters_is_not_taken_for_what_mixes_tokens() -> None:
    config = peft.LoraConfig(r=2, target_modules=["key"], lora_dropout=0.5, init_lora_weights=False)
    model = peft.get_peft_model(rwkv(), config).train()
    state = torch.get_rng_state()
    with pytest.raises(
        oomb.UnsupportedModelError, match=r"its attention \(RwkvSelfAttention\) is a recurrence"
    ):
        oomb.Engine(model, oomb.Config(chunk_size=16, page_size=8))
    assert torch.equal(torch.get_rng_state(), state)
