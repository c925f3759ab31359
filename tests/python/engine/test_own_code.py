"""Attention modules that do not go through transformers' interface; test_conditions.py runs them
under every condition."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn
from transformers.models.falcon import modeling_falcon

import oomb
from oomb.model import own_code

from .models import of
from .own_code_models import OWN_CODE, make_own_code
from .reference import assert_equal, chunked, ordinary, random_ids, relative_error

CONFIG = oomb.Config(chunk_size=16, page_size=8)
ALIBI = "adds ALiBi, a bias that grows with the distance .*: take "


@pytest.mark.parametrize("name", OWN_CODE)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_equals_one_backward_of_either_own_code(name: str, implementation: str) -> None:
    model, ids = make_own_code(name, attn_implementation=implementation), random_ids(1, 50)
    assert model.config._attn_implementation == implementation
    assert_equal(chunked(model, CONFIG, ids, ids), ordinary(model, ids, ids))
    assert not any("forward" in vars(module) for module in model.modules())


def test_keys_are_stored_once_for_all_queries_that_read_them() -> None:
    model = make_own_code("falcon-40b")
    with oomb.Engine(model, CONFIG) as engine:
        assert {(shape.query_heads, shape.kv_heads) for shape in engine._shapes} == {(6, 2)}


def test_hidden_dropout_is_drawn_as_in_any_other_model() -> None:
    model = make_own_code("falcon-in-turn", hidden_dropout=0.1).train()
    ids = random_ids(1, 50)
    torch.manual_seed(3)
    one = chunked(model, CONFIG, ids, ids)
    torch.manual_seed(3)
    again = chunked(model, CONFIG, ids, ids)
    assert torch.equal(one.loss, again.loss)
    assert not torch.equal(one.loss, chunked(model.eval(), CONFIG, ids, ids).loss)


def test_a_dropout_of_attention_that_its_code_does_not_apply() -> None:
    """Without ALiBi its own code drops no weights, whatever its config says."""
    model, ids = make_own_code("falcon-7b", attention_dropout=0.5).train(), random_ids(1, 50)
    assert_equal(chunked(model, CONFIG, ids, ids), ordinary(model, ids, ids))


@pytest.mark.parametrize("training", [True, False])
def test_a_dropout_of_attention_that_its_code_applies(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention's alone does, which no CPU runs: what the interface is asked for."""
    config = make_own_code("falcon-7b", attention_dropout=0.5).config
    module = modeling_falcon.FalconFlashAttention2(config, layer_idx=0).train(training)
    asked: list[float] = []

    def attention(_: Any, q: torch.Tensor, *args: Any, dropout: float) -> tuple[torch.Tensor, None]:
        asked.append(dropout)
        return q.transpose(1, 2), None

    monkeypatch.setattr(own_code, "attention", attention)
    angles = torch.ones(1, 4, module.head_dim)
    forward = own_code.interface_forwards(module)[module]
    forward(torch.ones(1, 4, config.hidden_size), None, position_embeddings=(angles, angles))
    assert asked == [0.5 if training else 0.0]


def test_a_softmax_in_bfloat16_is_named() -> None:
    """Falcon's eager attention has one: with large scores it is far from the engine's, in fp32."""
    model = make_own_code("falcon-7b", attn_implementation="eager")
    with torch.no_grad():
        for layer in model.transformer.h:
            layer.self_attention.query_key_value.weight.mul_(6)
    text = r"or takes the softmax in bfloat16 \(load it with attn_implementation='sdpa'\)"
    with pytest.raises(oomb.UnsupportedModelError, match=text):
        oomb.Engine(model.bfloat16(), CONFIG)
    model.config._attn_implementation = "sdpa"
    oomb.Engine(model, CONFIG).close()


def test_a_classifier_that_does_not_hand_positions_on() -> None:
    config = make_own_code("falcon-7b").config
    config.num_labels, config.pad_token_id = 3, 0
    model: Any = modeling_falcon.FalconForSequenceClassification(config).double().eval()
    ids = 1 + random_ids(2, 49) % 96
    with oomb.Engine(model, CONFIG) as engine:
        with engine.two_pass(ids, logprobs=False, hidden=True) as two:
            logits = two.of_sequences()
            logits.square().sum().backward()
            two.sweep()
        found = {name: p.grad for name, p in model.named_parameters()}
        model.zero_grad(set_to_none=True)
    expected = model(input_ids=ids).logits
    expected.square().sum().backward()
    assert relative_error(logits.detach(), expected.detach()) <= 1e-12
    for name, p in model.named_parameters():
        assert relative_error(found[name], p.grad) <= 1e-12, name


def test_adapters_with_dropout() -> None:
    """What the check sees of a module's own forward was drawn once."""
    names = ["query_key_value", "dense"]
    config = peft.LoraConfig(r=2, target_modules=names, lora_dropout=0.5, init_lora_weights=False)
    model = peft.get_peft_model(make_own_code("falcon-40b", torch.float32), config).train()
    with oomb.Engine(model, CONFIG) as engine:
        assert engine.forward_backward(random_ids(1, 50), random_ids(1, 50)).loss > 0


@pytest.mark.parametrize("when", ["before", "behind"])
def test_a_forward_that_somebody_has_changed_is_refused(when: str) -> None:
    """Also one that a hook puts there after the engine was made, which calls would pass over."""
    model, ids = make_own_code("falcon-7b"), random_ids(1, 50)
    changed: Any = model.transformer.h[1].self_attention
    own = changed.forward
    other = r"^h\.1\.self_attention \(FalconAttention\): expected the forward of its class"

    def change() -> None:
        changed.forward = lambda hidden, **keywords: own(hidden.tanh(), **keywords)

    if when == "before":
        change()
        with pytest.raises(oomb.UnsupportedModelError, match=other):
            oomb.Engine(model, CONFIG)
        return
    with oomb.Engine(model, CONFIG) as engine:
        engine.forward_backward(ids, ids)
        change()
        with pytest.raises(oomb.UnsupportedModelError, match=other):
            engine.forward_backward(ids, ids)
        del changed.forward
        engine.forward_backward(ids, ids)
    assert "forward" not in vars(changed)


def test_own_code_that_attends_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_own_code("falcon-7b")
    plain = nn.functional.scaled_dot_product_attention

    def twice_as_sharp(q: torch.Tensor, *args: Any, **keywords: Any) -> torch.Tensor:
        return plain(2 * q, *args, **keywords)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", twice_as_sharp)
    with pytest.raises(oomb.UnsupportedModelError, match=r"h\.0 .*does not give the softmax"):
        oomb.Engine(model, CONFIG)


def bloom() -> nn.Module:
    return of("Bloom", n_layer=2, n_head=6)


def mpt() -> nn.Module:
    config = transformers.MptConfig(d_model=48, n_heads=6, n_layers=2, vocab_size=97)
    return transformers.MptForCausalLM(config).eval()  # type: ignore[no-any-return]


def falcon() -> nn.Module:
    return make_own_code("falcon-7b", alibi=True)


REFUSED = [
    (falcon, r"h\.0 \(FalconDecoderLayer\)"),
    (bloom, r"h\.0 \(BloomBlock\)"),
    (mpt, r"blocks\.0 \(MptBlock\)"),
]


@pytest.mark.parametrize(("build", "layer"), REFUSED)
def test_alibi_is_refused_by_its_name(build: Any, layer: str) -> None:
    with pytest.raises(oomb.UnsupportedModelError, match=f"{layer}: {ALIBI}"):
        oomb.Engine(build(), CONFIG)
