"""Distillation from a teacher's engine, against plain torch on whole logits in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import oomb
from oomb.core import divergence as divergence_module
from oomb.core import loss as loss_module

from .models import VOCABULARY, make
from .reference import EXACT, random_ids, relative_error, shifted, take_gradients

TOKENS = 75
IDS = random_ids(2, TOKENS)
MASK = torch.ones_like(IDS)
MASK[1, 50:] = 0
LABELS = IDS.masked_fill(MASK == 0, -100)
LABELS[0, :20] = -100
PLACES = torch.cat([torch.arange(n) for n in (30, 45)]).repeat(2, 1)
CONFIG = oomb.Config(chunk_size=16, page_size=8)
BEST = 5
Targets = oomb.TeacherTargets


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices that end inside chunks, and blocks that end inside slices."""
    monkeypatch.setattr(loss_module, "slice_rows", lambda *_: 7)
    monkeypatch.setattr(divergence_module, "_VALUES", 3 * VOCABULARY)


def teacher_of(name: str = "cohere", **settings: Any) -> Any:
    """Another model than any student here, sure of some tokens."""
    model: Any = make(name, hidden_size=36, num_hidden_layers=2, **settings)
    with torch.no_grad():
        for parameter in model.get_output_embeddings().parameters():
            parameter.mul_(2)
    return model.requires_grad_(False)


def divergence(p: torch.Tensor, q: torch.Tensor, reverse: bool) -> torch.Tensor:
    p, q = (q, p) if reverse else (p, q)
    return (p * (p.log() - q.log())).sum(-1)


def with_the_others(p: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    others = p.scatter(2, tokens, 0).sum(-1, keepdim=True)
    return torch.cat([p.gather(2, tokens), others], -1)


def ordinary(
    student: Any,
    teacher: torch.Tensor,
    labels: torch.Tensor,
    temperature: float,
    best: int | None,
    reverse: bool,
    **arguments: Any,
) -> torch.Tensor:
    """Loss of one forward on whole logits, and its backward.

    Args:
        teacher: its logits [batch, tokens, vocabulary].
    """
    student.zero_grad()
    q = (student(input_ids=IDS, use_cache=False, **arguments).logits / temperature).softmax(-1)
    p = (teacher / temperature).softmax(-1)
    if best is not None:
        tokens = p.topk(best).indices
        p, q = (with_the_others(x, tokens) for x in (p, q))
    loss = divergence(p, q, reverse)[shifted(labels) != -100].mean()
    loss.backward()
    return loss.detach()


def logits_of(model: Any, **arguments: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False, **arguments).logits  # type: ignore[no-any-return]


def assert_trains_alike(step: Any, student: Any, loss: torch.Tensor, stock: Any) -> None:
    found = take_gradients(student)
    assert relative_error(step.loss, loss) <= EXACT
    assert found.keys() == stock.keys()
    for name, gradient in stock.items():
        assert relative_error(found[name], gradient) <= EXACT, name


INNER = IDS.masked_fill(PLACES == 0, -100)
BATCHES: dict[str, tuple[torch.Tensor, dict[str, Any]]] = {
    "padded": (LABELS, {"attention_mask": MASK}),
    "documents": (INNER, {"position_ids": PLACES}),
}


@pytest.mark.parametrize("batch", list(BATCHES))
@pytest.mark.parametrize("reverse", [False, True], ids=["kl", "reverse"])
@pytest.mark.parametrize("best", [None, BEST, VOCABULARY - 1])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_equals_whole_logits(
    temperature: float, best: int | None, reverse: bool, batch: str
) -> None:
    labels, arguments = BATCHES[batch]
    student, teacher = make("qwen3"), teacher_of()
    loss = ordinary(
        student, logits_of(teacher, **arguments), labels, temperature, best, reverse, **arguments
    )
    stock = take_gradients(student)
    with oomb.Engine(teacher, oomb.Config(chunk_size=24, page_size=8)) as engine:
        targets = Targets.of(engine, IDS, **arguments, best=best, temperature=temperature)
    terms = targets.reverse_kl if reverse else targets.kl
    with oomb.Engine(student, CONFIG) as engine:
        step = engine.forward_backward(IDS, labels, **arguments, token_loss=terms)
    assert_trains_alike(step, student, loss, stock)
    assert all(p.grad is None for p in teacher.parameters())


@pytest.mark.parametrize("best", [None, BEST])
def test_within_a_loss_of_ones_own(best: int | None) -> None:
    """Beside the cross-entropy, with Hinton's factor."""
    student, teacher = make("qwen3"), teacher_of()
    given = logits_of(teacher), LABELS, 2.0, best, False
    counted = shifted(LABELS) != -100
    distilled = ordinary(student, *given)
    plain = torch.nn.functional.cross_entropy(
        student(input_ids=IDS, use_cache=False).logits[counted], shifted(LABELS)[counted]
    )
    gradients = take_gradients(student)
    plain.backward()
    stock = {n: g + 4 * gradients[n] for n, g in take_gradients(student).items()}
    with oomb.Engine(teacher, CONFIG) as engine:
        targets = Targets.of(engine, IDS, best=best, temperature=2.0)

    def mixed(logits: torch.Tensor, rows: oomb.TokenRows) -> torch.Tensor:
        own = torch.nn.functional.cross_entropy(logits, rows.targets, reduction="none")
        return own + 2.0**2 * targets.kl(logits, rows)

    with oomb.Engine(student, CONFIG) as engine:
        step = engine.forward_backward(IDS, LABELS, token_loss=mixed)
    assert_trains_alike(step, student, plain.detach() + 4 * distilled, stock)


@pytest.mark.parametrize("best", [None, BEST])
def test_a_model_without_its_adapter_teaches_itself(best: int | None) -> None:
    torch.manual_seed(0)
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model: Any = peft.get_peft_model(make("llama-tied"), settings).double()
    with model.disable_adapter():
        plain = logits_of(model)
    loss = ordinary(model, plain, LABELS, 1.0, best, False)
    stock = take_gradients(model)
    with oomb.Engine(model, CONFIG) as engine:
        with model.disable_adapter():
            targets = Targets.of(engine, IDS, best=best)
        step = engine.forward_backward(IDS, LABELS, token_loss=targets.kl)
        assert_trains_alike(step, model, loss, stock)


def test_what_was_kept_of_a_teacher_serves_later() -> None:
    student, teacher = make("qwen3"), teacher_of()
    with oomb.Engine(teacher, CONFIG) as engine:
        kept = Targets.of(engine, IDS, best=BEST, temperature=2.0)
    assert kept.token_ids is not None and kept.logprobs is not None
    p = (logits_of(teacher) / 2).softmax(-1)[:, :-1]
    tokens = p.topk(BEST).indices
    assert torch.equal(kept.token_ids[:, 1:].long(), tokens)
    found = kept.logprobs[:, 1:].exp()
    torch.testing.assert_close(found, with_the_others(p, tokens), rtol=1e-12, atol=0)
    again = Targets.stored(kept.token_ids, kept.logprobs, 2.0)
    of_those = Targets.stored(kept.token_ids, kept.logprobs[..., :-1], 2.0)
    with oomb.Engine(student, CONFIG) as engine:
        losses = [
            engine.forward_backward(IDS, LABELS, token_loss=x.kl).loss
            for x in (kept, again, of_those)
        ]
    assert torch.equal(losses[0], losses[1])
    assert relative_error(losses[2], losses[0]) <= EXACT


@pytest.mark.parametrize("best", [None, BEST])
def test_a_teachers_padded_vocabulary_is_cut(best: int | None) -> None:
    student, teacher = make("qwen3"), teacher_of(vocab_size=VOCABULARY + 15)
    cut = logits_of(teacher)[..., :VOCABULARY]
    loss = ordinary(student, cut, LABELS, 1.0, best, False)
    stock = take_gradients(student)
    with oomb.Engine(teacher, CONFIG) as engine, oomb.Engine(student, CONFIG) as own:
        targets = Targets.of(engine, IDS, best=best, vocab_size=VOCABULARY)
        step = own.forward_backward(IDS, LABELS, token_loss=targets.kl)
        assert_trains_alike(step, student, loss, stock)
        if best is None:
            with pytest.raises(ValueError, match=r"student's vocabulary of 112 .* got 97"):
                own.forward_backward(IDS, LABELS, token_loss=Targets.of(engine, IDS).kl)


@pytest.mark.parametrize("reverse", [False, True], ids=["kl", "reverse"])
@pytest.mark.parametrize("best", [None, BEST])
def test_tokens_that_cannot_come_give_no_nan(best: int | None, reverse: bool) -> None:
    """A teacher whose probabilities are 0 or 1, and a student who is nearly as sure."""
    logits = torch.full((4, VOCABULARY), -torch.inf)
    logits[:, 3] = 0
    tokens = torch.tensor([[3, 5, 7]] * 4)
    own = torch.full((4, VOCABULARY), -300.0)
    own[:, 3] = 0
    own.requires_grad_()

    def known(part: slice, log_q: torch.Tensor) -> torch.Tensor:
        whole = logits[part].log_softmax(-1)
        if best is None:
            return whole
        of_best = torch.cat([whole[:, [3, 5, 7]], torch.full((4, 1), -torch.inf)[part]], 1)
        return divergence_module.completed(tokens[part], of_best, log_q)

    terms = divergence_module.divergence(own, known, 1.0, reverse)
    terms.sum().backward()
    assert torch.equal(terms, torch.zeros(4)) and own.grad is not None
    assert bool(own.grad.isfinite().all())


class Sizes(TorchDispatchMode):
    """Elements of the largest tensor that is made."""

    largest = 0

    def __torch_dispatch__(
        self, func: Any, _: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(made) if isinstance(x, torch.Tensor)]
        self.largest = max([self.largest, *sizes])
        return made


@pytest.mark.parametrize("best", [None, BEST])
def test_nothing_of_the_size_of_whole_logits_exists(best: int | None) -> None:
    ids = random_ids(1, 400)
    student: Any = make("qwen3", vocab_size=960)
    teacher: Any = make("llama", vocab_size=960)
    engines = oomb.Engine(teacher, CONFIG), oomb.Engine(student, CONFIG)
    with engines[0] as engine, engines[1] as own, Sizes() as sizes:
        targets = Targets.of(engine, ids, best=best)
        own.forward_backward(ids, ids, token_loss=targets.kl)
    assert sizes.largest < ids.numel() * 960 / 4


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "best of none": ({"best": 0}, r"best: expected None or an int in 1 … 96, got 0"),
    "best of all": ({"best": VOCABULARY}, "best: expected None or an int in 1 … 96, got 97"),
    "best of half": ({"best": 2.5}, "best: expected None or an int .* got 2.5"),
    "no temperature": ({"temperature": 0}, "temperature: expected a number above 0, got 0"),
    "endless": ({"temperature": float("inf")}, "temperature: expected a number above 0, got inf"),
    "too many words": ({"vocab_size": 98}, "vocab_size: expected None or an int in 1 … 97"),
    "one row": ({"input_ids": IDS[0]}, "input_ids: expected"),
    "another mask": ({"attention_mask": MASK[:, 1:]}, "attention_mask: expected shape"),
}


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_an_argument_that_does_not_fit(mistake: str) -> None:
    arguments, message = MISTAKES[mistake]
    with oomb.Engine(teacher_of(), CONFIG) as engine, pytest.raises(ValueError, match=message):
        Targets.of(engine, **{"input_ids": IDS, **arguments})


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ((IDS, IDS), "token_ids: expected integers"),
        ((IDS[:, :, None], IDS[:, :, None]), "logprobs: expected floating-point numbers"),
        ((IDS[:, :, None], torch.zeros(2, 3, 1)), r"logprobs: expected .* got .*\(2, 3, 1\)"),
        ((None, None), "token_ids: expected integers .* got None"),
        ((IDS[:, :, None][..., :0], torch.zeros(*IDS.shape, 1)), "token_ids: expected integers"),
    ],
)
def test_what_cannot_have_been_stored(stored: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Targets.stored(*stored)


def another_text(engine: oomb.Engine, teacher: Any) -> Callable[..., torch.Tensor]:
    return Targets.of(engine, IDS[:, :40]).kl


def another_batch(engine: oomb.Engine, teacher: Any) -> Callable[..., torch.Tensor]:
    return Targets.of(engine, IDS[:1], best=3).kl


def more_words(engine: oomb.Engine, teacher: Any) -> Callable[..., torch.Tensor]:
    tokens = torch.full((2, TOKENS, 1), VOCABULARY)
    return Targets.stored(tokens, torch.full((2, TOKENS, 1), -1.0)).reverse_kl


def another_head(engine: oomb.Engine, teacher: Any) -> Callable[..., torch.Tensor]:
    targets = Targets.of(engine, IDS)
    teacher.get_output_embeddings().weight.mul_(2)
    return targets.kl


UNLIKE = {
    another_text: "token_loss: expected .* tokens, as the teacher saw",
    another_batch: "token_loss: expected .* sequences, as the teacher saw",
    more_words: "student's vocabulary of at least 98 .*got 97",
    another_head: "token_loss: expected the teacher's head as it was",
}


@pytest.mark.parametrize("build", list(UNLIKE), ids=lambda f: f.__name__)
def test_a_student_on_what_the_teacher_did_not_see(build: Any) -> None:
    student, teacher = make("qwen3"), teacher_of()
    with oomb.Engine(teacher, CONFIG) as engine, oomb.Engine(student, CONFIG) as own:
        terms = build(engine, teacher)
        with pytest.raises((ValueError, oomb.Error), match=UNLIKE[build]):
            own.forward_backward(IDS, IDS, token_loss=terms)
    assert all(p.grad is None for p in student.parameters())


def test_a_head_with_an_adapter_is_not_kept() -> None:
    settings = peft.LoraConfig(r=4, target_modules=["lm_head", "q_proj"])
    model: Any = peft.get_peft_model(make("llama"), settings)
    with oomb.Engine(model, CONFIG) as engine:
        with pytest.raises(ValueError, match="best: expected a number .* has an adapter"):
            Targets.of(engine, IDS)
        Targets.of(engine, IDS, best=3)
