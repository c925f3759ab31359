"""The ``data`` section carried out: files to training and evaluation sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from oomb.train.chat import chat_template
from oomb.train.documents import check_first_rows
from oomb.train.errors import BadInput
from oomb.train.examples import ExampleRule, Examples, examples_of
from oomb.train.image_examples import ImageRule, check_first_images, image_examples
from oomb.train.image_sequences import ImageSequences, image_sequences
from oomb.train.positions import SkippedPositions
from oomb.train.rows import RowRule
from oomb.train.sequences import SequenceDataset, Tokens, packed, windows
from oomb.train.settings import DataSettings, RunSettings
from oomb.train.sources import Source, find_sources
from oomb.train.tokenise import Rule, tokenise, with_every_character

Part = SequenceDataset | ImageSequences | Examples


@dataclass(frozen=True)
class Sources:
    """Files and data sets that were found and can be opened."""

    train: list[Source]
    eval: list[Source]

    def check_first_rows(self, rule: Rule | ImageRule) -> None:
        """Read the first rows of each, and their images.

        Raises:
            BadInput: one is not what it should be.
        """
        if isinstance(rule, ImageRule):
            check_first_images([*self.train, *self.eval], rule)
        else:
            check_first_rows([*self.train, *self.eval], rule.rows)


@dataclass(frozen=True)
class Data:
    """Sequences of a run, or a task's examples; ``eval`` is None where nothing is held out."""

    train: Part
    eval: Part | None

    @property
    def parts(self) -> list[Part]:
        return [self.train] if self.eval is None else [self.train, self.eval]


def find_data(settings: DataSettings) -> Sources:
    """The run's files and data sets.

    Raises:
        BadInput: one is missing, empty or cannot be opened.
    """
    train = find_sources("data.train", settings.train, settings.format)
    held_out = settings.eval or []
    return Sources(train, find_sources("data.eval", held_out, settings.format) if held_out else [])


def prepare_data(
    settings: RunSettings,
    sources: Sources,
    rule: Rule | ImageRule,
    examples: ExampleRule | None = None,
) -> Data:
    """Tokenise and arrange; what was tokenised before comes from the cache.

    Args:
        examples: of a task of TRL, which tokenises itself; None: there is none.

    Raises:
        BadInput: files that are not what they should be, or too little text.
    """
    data = _all_sequences(settings, sources, rule if examples is None else examples)
    span, seed = settings.data.simulated_context, settings.training.seed
    if span is not None and isinstance(data.train, SequenceDataset):
        # Evaluation keeps the positions there are.
        skipped = SkippedPositions(span, settings.data.simulated_pieces, seed)
        data = Data(data.train.spread(skipped), data.eval)
    most = settings.evaluation.max_sequences
    if data.eval is None or most is None:
        return data
    return Data(data.train, data.eval.subset(range(min(most, len(data.eval)))))


def _all_sequences(
    settings: RunSettings, sources: Sources, rule: Rule | ImageRule | ExampleRule
) -> Data:
    def of(field: str, files: list[Source]) -> Part:
        if isinstance(rule, Rule):
            return _sequences(settings, field, files, rule)
        if isinstance(rule, ImageRule):
            return _sequences_with_images(settings, field, files, rule)
        return examples_of(field, files, rule, settings.data.cache_dir)

    train = of("data.train", sources.train)
    if sources.eval:
        return Data(train, of("data.eval", sources.eval))
    if settings.data.eval_fraction > 0:
        return _hold_out(train, settings.data.eval_fraction, settings.training.seed)
    return Data(train, None)


def tokenising_rule(
    settings: DataSettings, tokenizer: PreTrainedTokenizerBase, num_embeddings: int = 1 << 31
) -> Rule:
    """How rows and documents become tokens, with ids below ``num_embeddings``.

    Raises:
        BadInput: the tokenizer is not a fast one, or lacks the token or template asked for.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise BadInput(
            "model.tokenizer: expected a fast tokenizer (with tokenizer.json), got "
            f"{type(tokenizer).__name__}"
        )
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if settings.add_eos and eos is None:
        raise BadInput(
            "data.add_eos: expected a tokenizer with an EOS token, got one without; "
            "data.add_eos=false leaves it out"
        )
    if settings.add_bos and bos is None:
        raise BadInput("data.add_bos: expected a tokenizer with a BOS token, got one without")
    adds_bos = settings.add_bos
    if adds_bos is None:
        adds_bos = bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
    before = (bos,) if adds_bos else ()
    rows = RowRule(
        kind=settings.kind,
        text_field=settings.text_field,
        messages_field=settings.messages_field,
        prompt_field=settings.prompt_field,
        completion_field=settings.completion_field,
        chat=chat_template(tokenizer, settings.chat_template),
        num_embeddings=num_embeddings,
    )
    written = with_every_character(backend.to_str())
    return Rule(written, before, (eos,) if settings.add_eos else (), rows)


def _sequences(
    settings: RunSettings, field: str, sources: list[Source], rule: Rule
) -> SequenceDataset:
    data = settings.data
    tokens = Tokens(tokenise(sources, rule, num_proc=data.num_proc, cache_dir=data.cache_dir))
    arrange = packed if data.arrange == "packed" else windows
    sequences = arrange(tokens.documents, settings.context, tokens.predicts)
    if not sequences and len(tokens) > 1:
        raise BadInput(
            f"{field}: expected tokens to predict (an assistant's turn, a completion, a label), "
            f"got none among {len(tokens):,}"
        )
    if not sequences:
        raise BadInput(f"{field}: expected at least two tokens of text, got {len(tokens)}")
    return SequenceDataset(tokens, sequences)


def _sequences_with_images(
    settings: RunSettings, field: str, sources: list[Source], rule: ImageRule
) -> ImageSequences:
    examples = image_examples(field, sources, rule, settings.data.cache_dir)
    packs = settings.data.arrange == "packed"
    return image_sequences(field, examples, rule.processing, settings.context, packs=packs)


def _hold_out(data: Part, fraction: float, seed: int) -> Data:
    """Some sequences for evaluation, at least one, drawn by the run's seed."""
    if len(data) < 2:
        raise BadInput(
            "data.eval_fraction: expected at least two sequences to share, got one; lower context "
            "or name files in data.eval"
        )
    number = min(len(data) - 1, max(1, round(fraction * len(data))))
    drawn = set(np.random.default_rng(seed).permutation(len(data))[:number].tolist())
    parts: tuple[list[int], list[int]] = ([], [])
    for index in range(len(data)):
        parts[index in drawn].append(index)
    train, held_out = (data.subset(part) for part in parts)
    return Data(train, held_out)
