"""What an engine says of every causal language model class of the installed transformers, tiny and
random, and how far its gradients are from ordinary ones; writes docs/models.md.

    python scripts/model_families.py [--only NAME ...] [--out FILE] [--against FILE] [--page FILE]

A line each: family, ``exact`` (and the worst parameter's error in fp64), ``wrong`` (likewise),
``refused`` and why, ``not built`` or ``crash``. ``--against`` prints what differs from a file of
another version. tests/python/test_families.py compares the page with what it measures.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import transformers
from published_sizes import section
from tiny_families import FAMILIES, Verdict, config_of, verdict

from oomb import _C
from oomb.trace.published import PUBLISHED

# The first release of transformers, of those below, from which on a family was found exact by this
# script's models (2026-11-27: 5.14.1, 5.15.1, 5.16.1, 5.17.0, 5.18.0, 5.19.0, 5.20.2, 5.21.1,
# 5.22.2, 5.23.0 and 5.24.0, each in a run of its own). Others are so from the first of them on.
_OLDEST = "5.14"
_SINCE = {
    "5.15": "axk1 dbrx granite_swa granitemoe_swa",
    "5.20": "beam kolibri1 moss_transcribe_diarize",
    "5.21": (
        "bailing_hybrid bamba cohere_compass_text falcon_h1 flint gemma2 granitemoehybrid "
        "kimi_linear lfm2 lfm2_moe nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe "
        "qwen3_5_moe_text qwen3_5_text qwen3_next vaultgemma zamba2 zaya"
    ),
    "5.23": "internlm3 iquestcoder lfm3",
    "5.24": "apertus1p5_text codegen exaone gptj lara_mini sarvam_mla sarvam_moe",
}
_KERNELS_OF_HOPPER = (64, 128, 256)  # head dims that its own kernels take, without a soft cap
_MIXERS = {  # parts of class names
    "GatedDeltaNet": "gated delta net",
    "BailingHybridDelta": "KDA",
    "KimiLinearDelta": "KDA",
    "Mamba": "Mamba-2",
    "Bamba": "Mamba-2",
    "FalconH1": "Mamba-2",
    "ShortConv": "short convolution",
    "ZayaCCA": "short convolution",
}

_HEAD = """# Models

What an engine says of every causal language model class of transformers {version}, tiny and with
random weights, and how its gradients compare with one ordinary backward in fp64. This page is
written by `python scripts/model_families.py --page docs/models.md`, and
`tests/python/test_families.py` fails where it differs from what is measured.

{exact} of {all} families are exact, {refused} are refused, {wrong} are wrong or crash, and
{unbuilt} cannot be made by the script. Exact means that every parameter's gradient agrees to
1e-12, with what transformers rounds to fp32 inside (norms, routers, recurrences, softmax) kept
in fp64 on both sides; left as it is, that rounding shows as about 1e-7. Layers may differ in
heads and head dims, and read one another's keys and values, as in the released sizes of Gemma
4. These runs are on text; [images and videos](vision.md) says which families also take images
exactly.
"""
_TABLE = """## Exact

- *family*: the `model_type` in a checkpoint's config. Some releases are of another's: Qwen3.6 of
  `qwen3_5` and `qwen3_5_moe`, Moonlight and Kimi K2 of `deepseek_v3`'s class.
- *error*: of the worst parameter's gradient, relative, rounded up to a power of ten.
- *heads: kernels*: head dims of the class's own default sizes, not of the tiny model, and what
  attention runs on in bf16 on Hopper. *wgmma*: kernels of its own. *tensor cores*: those for
  compute capability 8.0 and newer, on which every head dim of this column runs on an A100 as well,
  and those up to 256 on consumer cards. *plain*: any GPU, correct and slow. Heads of another size
  than 64, 96, 128, 256 and 512 get zeros behind them, up to the next of these: 192 and 128 of
  latent attention become 256, and 80 becomes 96; heads below 32 run on the plain kernels.
- *beside*: what the tiny model had in its attention. *latents*: pages hold these. Recurrences and
  convolutions hand their states on; [usage](usage.md#recurrent-layers) says which kernels run.
- *KiB*: of keys and values per token in bf16, of the released sizes that are known
  [below](#kib-per-token), in their order.
- *since*: first release of transformers, of the newest patch of each from {oldest} on, with which
  this was found. Before 5.21 Gemma 2 and VaultGemma need `attn_implementation="eager"`.
"""
_REFUSED = """## Refused

Why *indexers* are refused (DeepSeek V3.2, GLM-5): they choose keys for every query, 2,048 of the
past as released. Chunks could train such a model exactly, because the choice has no gradient
(transformers makes it without a graph, so ordinary training does not train the indexer either).
The first pass would keep the indexer's keys beside the pages, the second would choose as the first
did, and attention would take a list of keys per query. That last part is missing. Page rules give
a list of pages to a block of queries: 128 queries may choose 262,144 different keys, which is every
page of a past of 256K tokens. Pages in place of keys would train another model than the released
one, so the engine refuses.
"""
_NOTHING = "-"  # of a cell
_COLUMNS = ("family", "error", "heads: kernels", "beside", "KiB", "since")


def kernels(family: str, capped: bool) -> str:
    """Head dims of a class's default sizes, and the kernels that they run on."""
    parts = []
    for dim in _head_dims(config_of(family)):
        padded = _C.attention_head_dim(dim, 90)
        name = "tensor cores" if padded in (*_KERNELS_OF_HOPPER, 96, 512) else "plain"
        if padded in _KERNELS_OF_HOPPER and not capped:
            name = "wgmma"
        parts.append(f"{dim}: {name}")
    return ", ".join(parts)


def _head_dims(config: Any) -> list[int]:
    config = config.get_text_config(decoder=True)
    sizes = config.to_dict()
    if sizes.get("kv_lora_rank") and sizes.get("qk_nope_head_dim"):
        key = sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"]
        return [max(key, sizes["v_head_dim"])]
    layers = getattr(config, "per_layer_config", None)
    if layers:
        of_layers = (layers[index] for index in range(config.num_hidden_layers))
        found = {getattr(layer, "head_dim", None) or 0 for layer in of_layers} - {0}
        if found:
            return sorted(found)

    def first(*names: str) -> int:
        return next((x for name in names if (x := getattr(config, name, None))), 0)

    heads = first("num_attention_heads", "decoder_attention_heads", "n_head", "num_heads")
    width = first("hidden_size", "n_embd", "d_model")
    return [first("head_dim", "kv_channels") or width // heads]


def beside(found: Verdict) -> str:
    """What the attention of a tiny model had, and what hands on states."""
    words = [next((w for p, w in _MIXERS.items() if p in name), name) for name in found.mixers]
    return ", ".join(dict.fromkeys((*found.marks, *words)))


def cells(family: str, found: Verdict) -> list[str]:
    """A row of the table of exact families, without KiB."""
    order = f"1e{math.ceil(math.log10(max(found.error, 1e-16)))}"
    since = next((s for s, names in _SINCE.items() if family in names.split()), _OLDEST)
    return [
        f"`{family}`",
        order,
        kernels(family, "soft cap" in found.marks),
        beside(found),
        since,
    ]


def table_rows(page: str) -> Iterator[list[str]]:
    """Rows of that table on a page, without KiB."""
    for line in page.splitlines():
        if line.startswith("| `"):
            row = ["" if cell == _NOTHING else cell for cell in line[2:-2].split(" | ")]
            yield [*row[:4], row[5]]


def listed(page: str, title: str) -> dict[str, str]:
    """Families of a list on a page, and what it says of them."""
    part = page.split(f"## {title}\n")[1].split("\n## ")[0] if f"## {title}\n" in page else ""
    rows = re.split(r"^- ", part, flags=re.MULTILINE)[1:]
    found = (" ".join(row.split()).split(": ", 1) for row in rows)
    return {name.strip("`"): text for name, text in found}


def _kib(rows: str) -> dict[str, str]:
    """KiB per token of the released sizes of each model type, from the table of these."""
    found: dict[str, list[str]] = {}
    for line in rows.splitlines():
        name, *columns = line.strip("| ").split(" | ")
        if name in PUBLISHED:
            found.setdefault(PUBLISHED[name][0], []).append(columns[2])
    return {kind: ", ".join(values) for kind, values in found.items()}


def page(verdicts: dict[str, Verdict]) -> str:
    """docs/models.md."""
    kinds = [found.kind for found in verdicts.values()]
    head = _HEAD.format(
        version=transformers.__version__,
        all=len(kinds),
        exact=kinds.count("exact"),
        refused=kinds.count("refused"),
        wrong=kinds.count("wrong") + kinds.count("crash"),
        unbuilt=kinds.count("not built"),
    )
    parts = ["\n\n".join(_wrapped(part) for part in head.split("\n\n"))]
    sizes = section()
    released = _kib(sizes)
    rows = [_COLUMNS, ["---"] * len(_COLUMNS)]
    for family, found in verdicts.items():
        if found.kind == "exact":
            *row, since = cells(family, found)
            kib = released.get(family) or released.get(f"{family}_text", "")
            rows.append([*row, kib, since])
    table = "\n".join(f"| {' | '.join(cell or _NOTHING for cell in row)} |" for row in rows)
    parts.append(f"{_TABLE.format(oldest=_OLDEST)}\n{table}")
    parts.append(sizes)
    for title, kind in (("Refused", "refused"), ("Wrong", "wrong"), ("Not built", "not built")):
        lines = [
            _wrapped(f"- `{family}`: {found.reason or f'{found.error:.0e}'}")
            for family, found in verdicts.items()
            if found.kind == kind
        ]
        if lines:
            head = _REFUSED if kind == "refused" else f"## {title}\n"
            parts.append(f"{head}\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _wrapped(text: str) -> str:
    if text.startswith("#"):
        return text
    indent = "  " if text.startswith("- ") else ""
    words = " ".join(text.split())
    return textwrap.fill(
        words, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", nargs="+", help="families, by their model_type")
    parser.add_argument("--out", type=Path, help="write verdicts as JSON")
    parser.add_argument("--against", type=Path, help="print what differs from this JSON")
    parser.add_argument("--page", type=Path, help="write docs/models.md")
    arguments = parser.parse_args()
    if arguments.only and arguments.page:
        parser.error("--page: expected all families, got --only; the page has them all")
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    verdicts: dict[str, Verdict] = {}
    for family in FAMILIES:
        if arguments.only and family not in arguments.only:
            continue
        verdicts[family] = verdict(family)
        print(f"{family}: {verdicts[family]}", flush=True)
    kinds = [found.kind for found in verdicts.values()]
    print({kind: kinds.count(kind) for kind in sorted(set(kinds))}, file=sys.stderr)
    if arguments.out:
        arguments.out.write_text(
            json.dumps({f: asdict(v) for f, v in verdicts.items()}, indent=1) + "\n"
        )
    if arguments.page:
        arguments.page.write_text(page(verdicts))
    if arguments.against:
        before = json.loads(arguments.against.read_text())
        for family, found in verdicts.items():
            was = before.get(family, {"kind": "not there"})
            if was["kind"] != found.kind:
                print(f"- {family}: {was}\n+ {family}: {found}")


if __name__ == "__main__":
    main()
