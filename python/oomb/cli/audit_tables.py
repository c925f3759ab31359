"""An audit's figures on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from oomb.audit import Audit, Likeness, RoundedAudit, SampledAudit, SparseLayer
from oomb.audit.results import budget_of


def show(console: Console, found: Audit) -> None:
    """Tables of what was audited, then the advice."""
    console.print(
        f"{found.num_tokens:,} tokens in {found.num_chunks} chunks of {found.chunk_size:,}, pages "
        f"of {found.page_size}; exact loss {found.loss:.4f}. Outputs and attention at "
        f"{len(found.sampled_blocks)} of {found.num_blocks} query blocks.",
        highlight=False,
    )
    if found.sparse:
        for table in (_budgets(found), *_layers(found)):
            _print(console, table)
    if found.sampled:
        _print(console, _sampled(found))
    if found.truncated:
        _print(console, _truncated(found))
    if found.rounded is not None:
        _print(console, _rounded(found.rounded))
    console.print(
        "Errors are ‖approximate - exact‖ / ‖exact‖. Attention seen is the share of exact "
        "attention that falls on the pages read.\n",
        style="dim",
        highlight=False,
    )
    for sentence in found.advice:
        console.print(sentence, markup=False, highlight=False)


def _print(console: Console, table: Table) -> None:
    """With its title in one line, however narrow the table is."""
    console.print(table.title, style="bold", highlight=False, soft_wrap=True)
    table.title = None
    console.print(table, "")


def _budgets(found: Audit) -> Table:
    table = _table("Page-sparse attention against exact", "budget")
    for name in ("loss", "gradient: cosine", "error", "attention seen", "least layer"):
        table.add_column(name, justify="right")
    for one in found.sparse:
        masses = [layer.mass for layer in one.layers if layer.mass is not None]
        table.add_row(
            budget_of(one.rule),
            f"{one.loss:.4f}",
            *_cells(one.gradient),
            _share(sum(masses) / len(masses) if masses else None),
            _share(min(masses, default=None)),  # every layer may have a window
        )
    return table


def _layers(found: Audit) -> list[Table]:
    """A row per layer, a column per budget."""
    tables = []
    for title, cell in (
        ("Error of a layer's output", _output),
        ("Error of a layer's gradient", _gradient),
        ("Attention seen in a layer", _seen),
    ):
        table = _table(title, "layer")
        for one in found.sparse:
            table.add_column(budget_of(one.rule), justify="right", min_width=7)
        for layer in range(len(found.sparse[0].layers)):
            table.add_row(str(layer), *(cell(one.layers[layer]) for one in found.sparse))
        tables.append(table)
    return tables


def _output(layer: SparseLayer) -> str:
    return f"{layer.output.error:.4f}"


def _gradient(layer: SparseLayer) -> str:
    return "frozen" if layer.gradient is None else f"{layer.gradient.error:.4f}"


def _seen(layer: SparseLayer) -> str:
    return "window" if layer.mass is None else f"{layer.mass:.1%}"


def _sampled(found: Audit) -> Table:
    table = _table("Sampled chunks (SpaCO) against exact: one step's gradient", "keep")
    for name in ("cap", "draws", "error", "spread", "bias", "largest error"):
        table.add_column(name, justify="right")
    for one in found.sampled:
        table.add_row(
            f"{one.rule.keep:g}",
            "none" if one.rule.cap is None else f"{one.rule.cap:g}",
            "all subsets" if one.exhaustive else str(one.draws),
            f"{one.gradient.error:.3f}",
            f"{one.gradient.spread:.3f}",
            _bias(one),
            f"{max(one.errors):.3f}",
        )
    return table


def _truncated(found: Audit) -> Table:
    table = _table("Truncated chunks against exact: the gradient", "window")
    for name in ("cosine", "error", "largest of a layer"):
        table.add_column(name, justify="right")
    for one in found.truncated:
        table.add_row(str(one.rule.window), *_cells(one.gradient), _largest(one.layers))
    return table


def _rounded(one: RoundedAudit) -> Table:
    table = _table("Gradient pages against exact: the gradient", "dtype")
    for name in ("cosine", "error", "largest of a layer"):
        table.add_column(name, justify="right")
    table.add_row(one.kv_grad_dtype, *_cells(one.gradient), _largest(one.layers))
    return table


def _largest(layers: list[Likeness | None]) -> str:
    errors = [layer.error for layer in layers if layer is not None]
    return f"{max(errors):.4f}" if errors else ""


def _bias(one: SampledAudit) -> str:
    """Of random draws with its noise."""
    bias = f"{one.gradient.bias:.3f}"
    return bias if one.exhaustive else f"{bias} ± {one.gradient.spread / one.draws**0.5:.3f}"


def _table(title: str, first: str) -> Table:
    table = Table(title=title, box=None, pad_edge=False)
    table.add_column(first, justify="right")
    return table


def _cells(one: Likeness) -> tuple[str, str]:
    return f"{one.cosine:.4f}", f"{one.error:.4f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
