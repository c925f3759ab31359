"""``oomb audit`` on a model in a folder, and what it says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from engine.models import make
from oomb import Config, Engine, SampledChunks, TopKPages, TruncatedChunks
from oomb.audit import (
    Likeness,
    RoundedAudit,
    SampledAudit,
    SparseAudit,
    SparseLayer,
    TruncatedAudit,
    audit,
)
from oomb.audit.advice import advice
from oomb.audit.results import Spread
from oomb.cli import app
from oomb.cli.demo_tokenizer import byte_tokenizer
from oomb.errors import Error, OutOfMemoryError, UnsupportedModelError

WORDS = "the quick brown fox jumps over the lazy dog; " * 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    make("llama", torch.float32, vocab_size=256).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(WORDS)
    return path


def run(folder: Path, text: Path, *options: str) -> Result:
    sizes = ["--chunk-size", "16", "--page-size", "8", "--context", "60"]
    return CliRunner().invoke(app, ["audit", str(folder), str(text), *sizes, *options])


def test_figures_are_those_of_the_function(folder: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "audit.json"
    result = run(folder, text, "--budget", "1,3", "--keep", "0.25,0.5", "--draws", "16",
                 "--window", "0,2", "--kv-grad-dtype", "bfloat16",
                 "--out", str(out))  # fmt: skip
    assert result.exit_code == 0, result.output
    ids = torch.tensor([[*WORDS.encode()[:60]]])
    model = make("llama", torch.float32, vocab_size=256)
    expected = audit(
        model,
        ids,
        ids,
        config=Config(chunk_size=16, page_size=8),
        attention=[TopKPages(budget=1), TopKPages(budget=3)],
        # A cap of 2 bounds nothing where half of the chunks are kept.
        backward=[
            SampledChunks(),
            SampledChunks(cap=2.0),
            SampledChunks(keep=0.5),
            TruncatedChunks(window=0),
            TruncatedChunks(window=2),
        ],
        draws=16,
        kv_grad_dtype="bfloat16",
    )
    assert json.loads(out.read_text()) == json.loads(json.dumps(expected.as_dict()))
    for one in expected.sparse:
        assert f"{one.gradient.error:.4f}" in result.output
        for layer in one.layers:
            assert layer.mass is not None and f"{layer.mass:.1%}" in result.output
    assert "all subsets" in result.output and expected.advice[0][:40] in result.output


def test_long_text_is_read_until_there_are_enough_tokens(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("ab" * 100_000)
    result = run(folder, path, "--budget", "1")
    assert result.exit_code == 0 and "60 tokens in 4 chunks" in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            (),
            "--budget, --keep, --window, --kv-grad-dtype: expected at least one of them, got none",
        ),
        (("--kv-grad-dtype", "float16"), "--kv-grad-dtype: expected bfloat16 or '', got 'float16'"),
        (("--budget", "8,x"), "--budget: expected numbers such as 8,16,32, got '8,x'"),
        (("--budget", "0"), "budget: expected an int >= 1, got 0"),
        (("--keep", "2"), "keep: expected a number in (0, 1], got 2.0"),
        (("--budget", "8", "--share", "none"), "share: expected 'all_heads' or 'kv_head'"),
        (("--budget", "8", "--page-size", "7"), "chunk_size: expected a multiple of page_size 7"),
        (("--budget", "8", "--chunk-size", "64"), "expected more tokens than a chunk's 64, got 60"),
        (("--budget", "8", "--context", "1Q"), "--context: expected tokens such as 131072, 128K"),
        (("--budget", "8", "--host-memory", "much"), "host_memory: expected bytes or a size"),
        (("--budget", "8;16"), "--budget: expected numbers such as 8,16,32, got '8;16'"),
        (("--keep", "0"), "keep: expected a number in (0, 1], got 0.0"),
        (("--keep", "0.5", "--cap", "0.5"), "cap: expected None or a number >= 1, got 0.5"),
        (
            ("--budget", "8", "--device", "gpu"),
            "--device: expected 'auto', 'cuda' or 'cpu', got 'gp",
        ),
        (("--budget", "8", "--dtype", "bf16"), "--dtype: expected 'auto', 'float32', 'bfloat16'"),
        (("--budget", "8", "--out", "."), "--out: expected a file to write, got the folder ."),
        (("--budget", "8", "--out", "/proc/x/y"), "--out: expected a file to write, got /proc/x/y"),
    ],
)
def test_bad_options_are_named(
    folder: Path, text: Path, options: tuple[str, ...], message: str
) -> None:
    result = run(folder, text, *options)
    assert result.exit_code == 2 and message in result.output
    assert "Traceback" not in result.output and "pydantic" not in result.output


def test_context_beyond_the_models_positions(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text(WORDS * 9)
    result = run(folder, path, "--budget", "8", "--context", "600")
    assert result.exit_code == 2
    assert "--context: expected at most the model's 512 positions, got 600" in result.output


def test_missing_files_are_named(folder: Path, text: Path, tmp_path: Path) -> None:
    missing = run(folder, tmp_path / "none.txt", "--budget", "8")
    assert missing.exit_code == 2
    assert "text: expected a file, got " in missing.output and "none.txt" in missing.output
    missing = run(tmp_path / "no-model", text, "--budget", "8")
    assert missing.exit_code == 2 and "no-model" in missing.output


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("model: expected a gradient"), 2),
        (UnsupportedModelError("layers.0: hands on states"), 2),
        (OutOfMemoryError("host_memory: expected more"), 1),
        (Error("engine: expected one call at a time"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_the_library_refuses_is_one_line(
    folder: Path, text: Path, error: Exception, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Engine, "forward_backward", refused)
    result = run(folder, text, "--keep", "0.5")
    assert result.exit_code == code and isinstance(result.exception, SystemExit)
    assert result.stderr == f"oomb audit: {error}\n" and "Traceback" not in result.output


def test_memory_that_does_not_suffice(folder: Path, text: Path) -> None:
    result = run(folder, text, "--budget", "1", "--device-memory", "1KiB", "--host-memory", "1KiB")
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    (line,) = result.stderr.splitlines()
    assert line.startswith("oomb audit: ") and "out of memory. Raise host_memory" in line


def test_what_is_no_text(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "bytes.txt"
    path.write_bytes(b"abc\xff\xfe" * 100)
    result = run(folder, path, "--budget", "8")
    assert result.exit_code == 2 and "text: expected UTF-8 text, got " in result.output


# What it recommends -------------------------------------------------------------------------------


def sparse(budget: int, error: float, masses: tuple[float, ...] = (0.9, 0.7)) -> SparseAudit:
    one = Likeness(1.0, error)
    layers = [SparseLayer(output=one, gradient=one, mass=m, past_mass=None) for m in masses]
    return SparseAudit(rule=TopKPages(budget=budget), loss=1.0, gradient=one, layers=layers)


def sampled(keep: float, cap: float | None, bias: float, spread: float) -> SampledAudit:
    found = Spread(bias=bias, spread=spread, error=(bias**2 + spread**2) ** 0.5)
    return SampledAudit(
        rule=SampledChunks(keep=keep, cap=cap),
        draws=8,
        exhaustive=True,
        gradient=found,
        layers=[],
        losses=[],
        errors=[],
        weights=[],
    )


def test_the_smallest_budget_within_the_tolerance() -> None:
    tried = [sparse(8, 0.3), sparse(32, 0.01), sparse(16, 0.04)]
    (sentence,) = advice(tried, [], 0.05)
    assert sentence == (
        "Budget 16 is the smallest of 8, 16, 32 whose gradient stays within 5% of the exact one "
        "(4.0% off). It ranks pages by the means of their keys, which can lose the one key that "
        "counts: try summary bounds with score token_softmax. Confirm a budget by questions about "
        "what is far back, asked under it (docs/quality.md)."
    )


def test_who_ranks_by_bounds_is_not_warned_of_means() -> None:
    bounds = TopKPages(budget=16, score="token_softmax", summary="bounds")
    for error in (0.04, 0.4):
        means = sparse(8, 0.6)  # not recommended, so its rule does not matter
        (sentence,) = advice([means, replace(sparse(16, error), rule=bounds)], [], 0.05)
        assert "16" in sentence and "means" not in sentence
        assert sentence.endswith("asked under it (docs/quality.md).")


def test_no_budget_within_the_tolerance() -> None:
    (sentence,) = advice([sparse(8, 0.3), sparse(16, 0.2)], [], 0.05)
    assert sentence.startswith("No budget of 8, 16 keeps the gradient within 5%")
    assert "the nearest, 16, is 20.0% off" in sentence and "stay exact" in sentence


def truncated(window: int, error: float) -> TruncatedAudit:
    return TruncatedAudit(
        rule=TruncatedChunks(window=window), gradient=Likeness(1.0, error), layers=[]
    )


def test_the_smallest_window_within_the_tolerance() -> None:
    tried = [truncated(4, 0.02), truncated(1, 0.3), truncated(2, 0.08)]
    (sentence,) = advice([], [], 0.1, tried)
    assert sentence.startswith("A window of 2 chunks is the smallest of 1, 2, 4 whose gradient")
    (sentence,) = advice([], [], 0.01, tried)
    assert sentence.startswith("No window of 1, 2, 4 chunks") and "nearest, 4, is 2.0%" in sentence


@pytest.mark.parametrize(("error", "word"), [(0.02, "within"), (0.2, "beyond")])
def test_rounded_pages_are_told_of(error: float, word: str) -> None:
    one = RoundedAudit(kv_grad_dtype="bfloat16", gradient=Likeness(1.0, error), layers=[])
    (sentence,) = advice([], [], 0.1, rounded=one)
    assert f"is {error:.2%} off, {word} 10%" in sentence


def test_the_unbiased_rule_that_averages_out_for_the_least_work() -> None:
    # Work is in proportion to keep times steps, and noise falls with the square root of the steps.
    half, quarter = sampled(0.5, None, 0.0, 0.9), sampled(0.25, None, 0.0, 1.2)
    (sentence,) = advice([], [half, quarter], 0.1)
    assert sentence == (
        "Without a cap keep=0.25 averages out for the least work: a step's gradient is 120% off, "
        "and 144 steps bring that to 10%."
    )


def test_draws_that_are_alike_do_not_make_an_error_small() -> None:
    """Two draws of the same chunks: no spread, and an error all the same."""
    (sentence,) = advice([], [sampled(0.25, None, 1.4, 0.0)], 0.1)
    assert "140% off, and 196 steps bring that to 10%" in sentence


def test_bias_of_a_cap_is_told() -> None:
    capped, free = sampled(0.25, 2.0, 0.3, 0.4), sampled(0.25, 4.0, 0.0, 1.5)
    (sentence,) = advice([], [capped, free], 0.1)
    assert "Without a cap keep=0.25" in sentence and "225 steps" in sentence  # 4 bounds nothing
    assert sentence.endswith(
        "A cap of 2 at keep=0.25 has single steps 50% off, of which a bias of 30% stays however "
        "many are averaged."
    )
    (alone,) = advice([], [capped], 0.1)
    assert alone.startswith("A cap of 2")
