"""``oomb audit``: what sparse attention, sampled and truncated chunks and bf16 pages would cost."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.console import Console

from oomb.cli.refusal import CORRECTABLE, check_out, refuse
from oomb.config import Config, SampledChunks, Score, Summary, TopKPages, TruncatedChunks
from oomb.lengths import parse_length

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from oomb.train.settings import ModelSettings

_CHARACTERS_PER_TOKEN = 8  # read at first


def audit(
    model: Annotated[str, typer.Argument(help="Folder of a model, or its name on the hub.")],
    text: Annotated[Path, typer.Argument(help="A text file, of the kind to train on.")],
    context: Annotated[str, typer.Option(help="Tokens of the text to use: 16384, 16K, 1M.")] = (
        "16K"
    ),
    budget: Annotated[str, typer.Option(help="Pages per query block: 8,16,32; '' for none.")] = "",
    share: Annotated[str, typer.Option(help="all_heads or kv_head.")] = "all_heads",
    score: Annotated[str, typer.Option(help=" or ".join(get_args(Score)) + ".")] = "block_mean",
    summary: Annotated[str, typer.Option(help=" or ".join(get_args(Summary)) + ".")] = "mean",
    keep: Annotated[str, typer.Option(help="Shares of chunks to sweep: 0.25,0.5.")] = "",
    cap: Annotated[str, typer.Option(help="Caps to try beside none: 2,4.")] = "2",
    window: Annotated[
        str, typer.Option(help="Chunks that gradient reaches back: 1,2,4 (TruncatedChunks).")
    ] = "",
    kv_grad_dtype: Annotated[
        str, typer.Option(help="bfloat16: gradient pages in it; '' for none.")
    ] = "",
    draws: Annotated[int, typer.Option(min=2, help="Random draws per rule of --keep.")] = 16,
    chunk_size: Annotated[int, typer.Option(help="Tokens per chunk.")] = 4096,
    page_size: Annotated[int, typer.Option(help="Tokens per page.")] = 128,
    sample_blocks: Annotated[
        int, typer.Option(min=1, help="Query blocks at which outputs and attention are compared.")
    ] = 32,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Relative error of the gradient to recommend by.")
    ] = 0.1,
    tokenizer: Annotated[str, typer.Option(help="Its folder or name; '': the model's.")] = "",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, …")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    device_memory: Annotated[str, typer.Option(help="Cap of the device tier; '' for none.")] = "",
    host_memory: Annotated[str, typer.Option(help="Cap of the host tier; '' for none.")] = "",
    out: Annotated[Path | None, typer.Option(help="Write every figure here, as JSON.")] = None,
) -> None:
    """Compare sparse attention, sampled and truncated chunks with exact training, layer by layer.

    Costs one exact step, one step per budget and window, one per draw and one with --kv-grad-dtype.
    Nothing is trained or changed.
    """
    try:
        rules = [
            TopKPages(
                budget=int(number),
                share=share,  # type: ignore[arg-type]
                score=score,  # type: ignore[arg-type]
                summary=summary,  # type: ignore[arg-type]
            )
            for number in _numbers("budget", budget, int)
        ]
        samplings = []
        for kept in _numbers("keep", keep, float):
            free = SampledChunks(keep=kept)
            capped = [SampledChunks(keep=kept, cap=bound) for bound in _numbers("cap", cap, float)]
            # A cap as high as the factor bounds nothing.
            samplings += [free, *(one for one in capped if one.dkv_factor < free.dkv_factor)]
        windows = [TruncatedChunks(window=chunks) for chunks in _numbers("window", window, int)]
        if not (rules or samplings or windows or kv_grad_dtype):
            names = "--budget, --keep, --window, --kv-grad-dtype"
            raise ValueError(f"{names}: expected at least one of them, got none")
        if kv_grad_dtype not in ("", "bfloat16"):
            raise ValueError(f"--kv-grad-dtype: expected bfloat16 or '', got {kv_grad_dtype!r}")
        config = Config(
            chunk_size=chunk_size,
            page_size=page_size,
            device_memory=device_memory or None,
            host_memory=host_memory or None,
        )
        length = parse_length("--context", context)
    except ValueError as error:
        refuse("audit", error)
    check_out("audit", "--out", out)
    settings = _model_settings(model, tokenizer or None, dtype, device)
    from transformers.utils import logging

    from oomb.audit import audit as run
    from oomb.cli.audit_tables import show
    from oomb.errors import Error, UnsupportedModelError
    from oomb.train.model import device_of, load_config, load_model, load_tokenizer

    console = Console()
    logging.disable_progress_bar()
    try:
        model_config = load_config(settings)
        ids = _tokens(text, length, load_tokenizer(settings, model_config))
        _check_length(ids.shape[1], chunk_size, model_config, text)
        network = load_model(settings, None, model_config)
        ids = ids.to(device_of(settings))
        line = partial(console.print, markup=False, highlight=False)
        with console.status("") as status:
            found = run(
                network,
                ids,
                ids,
                config=config,
                attention=rules,
                backward=[*samplings, *windows],
                kv_grad_dtype=kv_grad_dtype or None,  # type: ignore[arg-type]
                draws=draws,
                sample_blocks=sample_blocks,
                tolerance=tolerance,
                on_call=status.update if console.is_terminal else line,
            )
    except (OSError, ValueError, Error) as error:
        correctable = isinstance(error, UnsupportedModelError) or not isinstance(error, Error)
        refuse("audit", error, CORRECTABLE if correctable else 1)
    show(console, found)
    if out is not None:
        out.write_text(json.dumps(found.as_dict(), indent=1) + "\n")
        console.print(f"Figures: {out}", markup=False, highlight=False, soft_wrap=True)


def _model_settings(name: str, tokenizer: str | None, dtype: str, device: str) -> ModelSettings:
    try:
        from pydantic import ValidationError

        from oomb.train.messages import messages
        from oomb.train.settings import ModelSettings
    except ModuleNotFoundError as error:
        if error.name == "oomb._C":
            refuse("audit", error, code=1)
        refuse("audit", f"needs {error.name}: pip install 'oomb[train]'", code=1)
    values = {"name": name, "tokenizer": tokenizer, "dtype": dtype, "device": device}
    try:
        return ModelSettings.model_validate(values)
    except ValidationError as error:
        refuse("audit", "; ".join(f"--{message}" for message in messages(error)))


def _numbers(option: str, text: str, kind: type[int] | type[float]) -> list[Any]:
    """Numbers of a list such as ``8,16,32``."""
    try:
        return [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"--{option}: expected numbers such as 8,16,32, got {text!r}") from None


def _tokens(path: Path, context: int, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """[1, <= context] int64: the text's first tokens. A long file is not read to its end."""
    import torch

    characters = _CHARACTERS_PER_TOKEN * context
    while True:
        try:
            with path.open(encoding="utf-8") as file:
                text = file.read(characters)
        except UnicodeDecodeError as error:
            raise ValueError(f"text: expected UTF-8 text, got {path}: {error.reason}") from None
        except OSError as error:
            raise ValueError(f"text: expected a file, got {path}: {error.strerror}") from None
        ids = tokenizer(text, verbose=False)["input_ids"]
        if len(ids) >= context or len(text) < characters:
            return torch.tensor([ids[:context]], dtype=torch.int64)
        characters *= 2


def _check_length(tokens: int, chunk_size: int, config: Any, text: Path) -> None:
    if tokens <= chunk_size + 1:
        raise ValueError(
            f"{text}: expected more tokens than a chunk's {chunk_size:,}, got {tokens:,}; with one "
            "chunk every rule is exact"
        )
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and tokens > positions:
        raise ValueError(
            f"--context: expected at most the model's {positions:,} positions, got {tokens:,}"
        )
