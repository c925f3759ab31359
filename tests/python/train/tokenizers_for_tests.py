"""Tokenizers of several kinds, trained in the test on a few words: no file, no network."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

WORDS = [
    "def read(self, number_of_bytes: int = 1024) -> bytes:\n    return self.stream.read(n)\n\n",
    "The quick brown fox — «naïve» coöperation, 3.14159 times; 1234567890 people, it's they've\n",
    "日本語のテキスト と 空白。 мир и война 🙂🙃\t\ttabs\n\n\n   spaces",
]
_GPT4_LIKE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _trained(tokenizer: Tokenizer, **settings: object) -> Tokenizer:
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False, **settings)
    tokenizer.train_from_iterator(WORDS * 3, trainer)
    return tokenizer


def gpt2() -> Tokenizer:
    """Bytes, split as GPT-2 does; offsets leave a word's leading space out."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained = _trained(tokenizer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    from tokenizers import processors

    trained.post_processor = processors.ByteLevel(trim_offsets=True)
    return trained


def qwen() -> Tokenizer:
    """Bytes, split by a pattern with numbers of three digits; normalised to NFC."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_GPT4_LIKE), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return _trained(tokenizer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def llama2() -> Tokenizer:
    """One piece for the whole text, spaces as marks, a mark before the first word."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trained = _trained(tokenizer, special_tokens=["<unk>"], max_token_length=12)
    trained.decoder = decoders.Replace("▁", " ")
    return trained


def unigram() -> Tokenizer:
    """Most likely pieces, split at spaces."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, show_progress=False, unk_token="<unk>", special_tokens=["<unk>"]
    )
    tokenizer.train_from_iterator(WORDS * 3, trainer)
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": gpt2,
    "qwen": qwen,
    "llama2": llama2,
    "unigram": unigram,
}
