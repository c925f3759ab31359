"""Results as tables in markdown: a row per trained model, a column per question."""

from __future__ import annotations

import statistics
from typing import Any

Asked = dict[tuple[str, str], list[float]]


def table(runs: list[dict[str, Any]]) -> str:
    """One table for each length and attention of the questions, means and ranges over seeds."""
    names = list(dict.fromkeys(name for run in runs for name in run["pieces"]))
    shares: dict[str, Asked] = {}  # by length and attention; (model, task)
    for run in runs:
        for name, piece in run["pieces"].items():
            for key, share in piece.get("asked", {}).items():
                task, length, attention = key.split(" | ")
                title = f"{int(length):,} tokens, {attention}"
                shares.setdefault(title, {}).setdefault((name, task), []).append(share)
    parts = [_training(runs, names)]
    parts += [f"{title}\n\n{_questions(names, found)}" for title, found in shares.items()]
    parts += _foretold(runs, names)
    if all("whole" in piece for run in runs for piece in run["pieces"].values()):
        spent = (sum(piece["whole"] for piece in run["pieces"].values()) for run in runs)
        parts.append(f"Seconds in all, by seed: {', '.join(f'{one:,.0f}' for one in spent)}")
    return "\n\n".join(parts)


def _foretold(runs: list[dict[str, Any]], names: list[str]) -> list[str]:
    """What the audit said of a model, by length: error of the gradient, and what it consists of."""
    told: dict[tuple[str, str], dict[str, list[dict[str, float | None]]]] = {}
    for run in runs:
        for name in names:
            for length, rules in run["pieces"].get(name, {}).get("foretold", {}).items():
                for rule, figures in rules.items():
                    told.setdefault((name, length), {}).setdefault(rule, []).append(figures)
    parts = []
    for (name, length), found in told.items():
        rows = [["the audit", "error of the gradient", "bias", "its noise",
                 "past attention seen, least layer"]]  # fmt: skip
        rows += [
            [rule, *(_cell([figure for one in each if (figure := one.get(key)) is not None])
                     for key in ("gradient", "bias", "noise", "past"))]
            for rule, each in found.items()
        ]  # fmt: skip
        parts.append(f"{name}, foretold at {int(length):,} tokens\n\n{_markdown(rows)}")
        told_true = [_told_true(run, name, length) for run in runs]
        if any(told_true):
            parts.append("\n".join(filter(None, told_true)))
    return parts


def _told_true(run: dict[str, Any], name: str, length: str) -> str:
    """How the order of methods by the audit of their start agrees with what they learned, and with
    what they answer under the attention that they were trained under."""
    rules = run["pieces"].get(name, {}).get("foretold", {}).get(length, {})
    errors, learned, own = [], [], []
    for rule, told in rules.items():
        piece = run["pieces"].get(f"{length} {rule}", {})
        dense = _share(piece, length, "dense")
        if piece.get("begins_from") == run["pieces"][name].get("begins_from") and dense is not None:
            asked = _share(piece, length, rule)
            errors.append(told.get("bias", told["gradient"]))
            learned.append(dense)
            own.append(dense if asked is None else asked)
    if len(errors) < 4:
        return ""
    found = [statistics.correlation(_ranks(errors), _ranks(x)) for x in (learned, own)]
    return (
        f"Seed {run['seed']}, {len(errors)} methods: rank correlation of the error that does not "
        f"average out with right answers, asked densely {found[0]:.2f}, asked as trained "
        f"{found[1]:.2f}"
    )


def _share(piece: dict[str, Any], length: str, attention: str) -> float | None:
    """Mean over tasks."""
    end = f" | {length} | {attention}"
    shares = [share for key, share in piece.get("asked", {}).items() if key.endswith(end)]
    return statistics.mean(shares) if shares else None


def _ranks(numbers: list[float]) -> list[float]:
    """Of each, among all; equal ones share theirs (Spearman)."""
    return [sum(other < one for other in numbers) + (numbers.count(one) - 1) / 2 for one in numbers]


def _questions(names: list[str], found: Asked) -> str:
    tasks = list(dict.fromkeys(task for _, task in found))
    rows = [["trained", *tasks]]
    for name in names:
        if any(model == name for model, _ in found):
            rows.append([name, *(_cell(found.get((name, task), [])) for task in tasks)])
    return _markdown(rows)


def _training(runs: list[dict[str, Any]], names: list[str]) -> str:
    """The loss is the mean of the last twentieth; of sampled chunks it is an estimate."""
    rows = [["trained", "steps", "tokens", "seconds", "loss", "needles", "steps to 90 %",
             "tokens to 90 %", "seconds to 90 %"]]  # fmt: skip
    for name in names:
        found = [run["pieces"][name] for run in runs if "steps" in run["pieces"].get(name, {})]
        if not found:
            continue
        reached = [one["reached"] for one in found if one["reached"] is not None]
        rows.append(
            [
                name,
                *(f"{statistics.mean(one[key] for one in found):,.0f}"
                  for key in ("steps", "tokens", "seconds")),
                _loss(found),
                _cell([one["probes"][-1]["needle"] for one in found]),
                *(_reached(reached, key, len(found)) for key in ("step", "tokens", "seconds")),
            ]
        )  # fmt: skip
    return _markdown(rows)


def _loss(found: list[dict[str, Any]]) -> str:
    if not found[0]["losses"]:  # nothing was trained
        return ""
    estimate = " (estimate)" if found[0]["loss_is"] == "estimate" else ""
    return f"{statistics.mean(one['losses'][-1] for one in found):.2f}{estimate}"


def _reached(reached: list[dict[str, float]], key: str, seeds: int) -> str:
    """Mean and range over seeds; steps are not known of older runs."""
    if not all(key in one for one in reached):
        return ""
    if not reached:
        return "not reached"
    numbers = [one[key] for one in reached]
    said = f"{statistics.mean(numbers):,.0f}"
    if len(set(numbers)) > 1:
        said += f" ({min(numbers):,.0f} to {max(numbers):,.0f})"
    return said if len(reached) == seeds else f"{said}, {len(reached)} of {seeds} seeds"


def _cell(shares: list[float]) -> str:
    if not shares:
        return ""
    mean = f"{statistics.mean(shares):.2f}"
    return mean if len(shares) == 1 else f"{mean} ({min(shares):.2f} to {max(shares):.2f})"


def _markdown(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines)
