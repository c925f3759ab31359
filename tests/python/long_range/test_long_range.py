"""bench/long_range: its tasks say where their answers are, and a run goes on where it stopped."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

BENCH = Path(__file__).parents[3] / "bench"
sys.path.insert(0, str(BENCH))

from long_range.data import Data  # noqa: E402
from long_range.evaluation import exact_match  # noqa: E402
from long_range.learning import draw_learning  # noqa: E402
from long_range.model import SIZES, Rope, load, new_model, save  # noqa: E402
from long_range.profiles import PROFILES, pieces  # noqa: E402
from long_range.run import Run, kept_from, main, means  # noqa: E402
from long_range.tables import table  # noqa: E402

import oomb  # noqa: E402
from long_range import tasks  # noqa: E402

ROPE = Rope(1e8, 1024)


def draws(task: str) -> list[tasks.Problem]:
    return [tasks.TASKS[task](np.random.default_rng(seed)) for seed in range(20)]


@pytest.mark.parametrize("task", tasks.NEEDLES)
def test_needles_are_in_the_facts_in_their_order(task: str) -> None:
    for problem in draws(task):
        for (mark, name), answer in problem.questions:
            assert mark == tasks.ASK
            told = [fact[2:] for fact in problem.facts if fact[:2] == [tasks.FACT, name]]
            assert [word for value in told for word in value] == answer
        firsts = [fact[2] for fact in problem.facts]
        assert len(set(firsts)) == len(firsts)


def test_tracked_variables_hold_the_value() -> None:
    for problem in draws("variable tracking"):
        [((_, value), answer)] = problem.questions
        held = {value}
        for _, name, other in problem.facts:
            if other in held:
                held.add(name)
        assert held == {value, *answer} and len(answer) == 4


def test_common_words_are_those_that_come_most_often() -> None:
    for problem in draws("common words"):
        counts = Counter(word for fact in problem.facts for word in fact[1:])
        [(_, answer)] = problem.questions
        assert sorted(word for word, _ in counts.most_common(4)) == answer
        assert sorted(counts.values())[-5:] == [2, 12, 12, 12, 12]


def test_two_facts_lead_to_the_answer() -> None:
    for problem in draws("two facts"):
        told = {fact[1]: fact[2] for fact in problem.facts}
        [((_, who), answer)] = problem.questions
        assert [told[who], told[told[who]]] == answer


@pytest.mark.parametrize("task", tasks.TASKS)
def test_sequences_hold_all_of_it_among_the_text(task: str) -> None:
    random = np.random.default_rng(1)
    problem, text = draws(task)[0], np.arange(5000) % 256
    tokens, counted = tasks.composed(problem, text, 2048, random)
    assert len(tokens) == 2048 and tokens.max() < tasks.VOCABULARY
    assert tokens[counted].tolist() == [word for _, answer in problem.questions for word in answer]
    words = [word for fact in problem.facts for word in fact]
    first = 2048 - (problem.tokens - len(words))
    assert [t for t in tokens[:first].tolist() if t >= 256] == words
    filler = tokens[tokens < 256]
    assert len(filler) == 2048 - problem.tokens
    assert (np.diff(filler) % 256 == 1).all()  # the text itself, nothing left out


def test_batches_depend_on_seed_and_step_alone() -> None:
    first, again = Data(3).training(5, 8, 256, 0.6), Data(3).training(5, 8, 256, 0.6)
    assert all(map(torch.equal, vars(first).values(), vars(again).values()))
    other = Data(3).training(6, 8, 256, 0.6)
    assert not torch.equal(first.input_ids, other.input_ids)
    counted = first.labels >= 0
    assert torch.equal(first.labels[counted], first.input_ids[counted])
    assert (first.weights[counted] == 1).all() and counted.any(dim=1).all()


@pytest.mark.parametrize("others", [1, 2, 3])
def test_so_many_of_four_sequences_have_another_task(others: int) -> None:
    """Many needles ask some twenty times in such a length, other needles at most four times."""
    batch = Data(0).training(0, 28 * 4, 1024, 0.6, others)
    marks = [set(row.tolist()) & {tasks.TRACE, tasks.COMMON, tasks.HOP} for row in batch.input_ids]
    asked = (batch.input_ids == tasks.ASK).sum(dim=1)
    of_others = [bool(mark) or asks <= 4 for mark, asks in zip(marks, asked.tolist(), strict=True)]
    assert of_others == [row % 4 >= 4 - others for row in range(28 * 4)]


@pytest.mark.parametrize("length", [64, 512, 8192])
def test_text_weighs_the_same_share_at_every_length(length: int) -> None:
    batch = Data(0).training(0, 4, length, 0.6)
    counted, text = batch.labels >= 0, batch.input_ids < 256
    facts = ~counted & ~text
    assert batch.weights[text].sum() / counted.sum() == pytest.approx(0.1, rel=1e-4)
    assert (batch.weights[facts] == 0).all()


def test_one_wrong_word_is_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits that know the text, but for one word of one answer."""
    model = new_model(SIZES["tiny"], 0, ROPE)
    data, asked = Data(0), Data(0).asked("needle", 4, 256, 4)[0]
    known = torch.nn.functional.one_hot(asked.input_ids, tasks.VOCABULARY).float()
    row, place = (asked.labels >= 0).nonzero()[3].tolist()
    known[row, place] = known[row, 0]

    class Knowing:
        def __init__(self, *_: object) -> None:
            pass

        def __enter__(self) -> Knowing:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def evaluate(self, ids: torch.Tensor, labels: torch.Tensor, on_logits: object) -> None:
            for begin in range(0, 256, 100):
                stop = min(begin + 100, 255)
                on_logits(begin, known[:, begin + 1 : stop + 1])  # type: ignore[operator]

    monkeypatch.setattr(oomb, "Engine", Knowing)
    config = oomb.Config(chunk_size=64, page_size=16)
    share = exact_match(model, config, data, "needle", length=256, number=4, batch=4)
    assert share == 0.75


def test_a_checkpoint_is_the_model(tmp_path: Path) -> None:
    model = new_model(SIZES["tiny"], 3, ROPE)
    save(tmp_path / "one.pt", model, "tiny", ROPE)
    found = load(tmp_path / "one.pt")
    assert found.config.rope_parameters == model.config.rope_parameters
    for one, other in zip(found.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other.bfloat16().float())


@pytest.mark.parametrize("length", [128, 512])
def test_an_untrained_model_looks_names_up(length: int) -> None:
    """Head 0 of layer 0 looks at the token before, head 0 of layer 1 behind the name asked for."""
    model = new_model(SIZES["small"], 0, PROFILES["quick"].rope)
    model.set_attn_implementation("eager")
    found = 0
    for seed in range(4):
        random = np.random.default_rng(seed)
        problem = tasks.TASKS["needle, 8 keys"](random)
        tokens, counted = tasks.composed(problem, np.arange(5000) % 256, length, random)
        with torch.no_grad():
            seen = model(torch.from_numpy(tokens)[None], output_attentions=True).attentions
        assert seen[0][0, 0].diagonal(-1).mean() > 0.9
        asked = int(counted.nonzero()[0][0]) - 1
        told = int((tokens == tokens[asked]).nonzero()[0][0]) + 1
        found += int(seen[1][0, 0, asked].argmax()) == told
    assert found >= 2


def test_losses_are_averaged_over_all_steps() -> None:
    losses = [float(step % 2) for step in range(400)]  # as of chunks that are kept half the time
    assert means(losses) == [0.5] * 20
    assert means([3.0, 5.0]) == [3.0, 5.0]


@pytest.mark.parametrize(
    ("shares", "step"),
    [([0.2, 0.9, 1.0], 1), ([0.9, 0.8, 0.95], 2), ([1.0, 0.8], None), ([0.9], 0), ([], None)],
)
def test_enough_is_found_from_where_it_stays_found(shares: list[float], step: int | None) -> None:
    looks = [{"step": float(i), "needle": share} for i, share in enumerate(shares)]
    found = kept_from(looks)
    assert (None if found is None else found["step"]) == step


def learned(seed: int, shares: dict[str, list[float]]) -> dict[str, object]:
    """A run's record, of which the looks alone matter."""
    pieces = {}
    for method, each in shares.items():
        looks = [{"step": 8.0 * i, "seconds": 1.0 * i, "tokens": 100.0 * i, "needle": share}
                 for i, share in enumerate(each)]  # fmt: skip
        pieces[f"2048 {method}"] = {
            "method": method, "length": 2048, "steps": 8, "tokens": 100, "seconds": 1.0,
            "losses": [1.0], "loss_is": "all chunks", "probes": looks, "reached": kept_from(looks),
            "whole": 10.0 + seed,
        }  # fmt: skip
    return {"seed": seed, "pieces": pieces}


def test_the_table_says_in_how_many_seeds_enough_was_found(tmp_path: Path) -> None:
    start, runs = "untrained here", []
    for seed, (exact, one_back) in enumerate([([0.2, 0.9], [0.2, 1.0]), ([0.3, 0.5], [0.9, 1.0])]):
        runs.append(learned(seed, {start: exact[:1], "exact": exact, "1 back": one_back}))
    rows = {row.split(" | ")[0]: row.split(" | ") for row in table(runs).splitlines()}
    assert rows["| 2048 untrained here"][6] == "not reached"
    assert rows["| 2048 exact"][6] == "8, 1 of 2 seeds"
    assert rows["| 2048 1 back"][6] == "4 (0 to 8)"
    assert table(runs).endswith("Seconds in all, by seed: 30, 33")
    picture = tmp_path / "learning.png"
    draw_learning(picture, runs, 0.9)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_table_says_how_well_the_audit_foretold_what_was_learned() -> None:
    """Its largest error went with the fewest right answers; asked as trained, two change places."""
    told: dict[str, tuple[dict[str, float], list[float]]] = {
        "SpaCO 1/2": ({"gradient": 9.0, "bias": 0.0}, [0.9]),  # noise averages out
        "64 pages": ({"gradient": 0.2}, [0.8, 0.5]),
        "32 pages": ({"gradient": 0.3}, [0.8, 0.6]),
        "1 back": ({"gradient": 0.4}, [0.7]),
        "4 back": ({"gradient": 0.5}, [0.0]),
        "2 back": ({"gradient": 0.6}, []),  # was not trained
    }
    run: dict[str, Any] = learned(3, {name: [0.5] for name in ("untrained here", *told)})
    errors = {name: error for name, (error, _) in told.items()}
    run["pieces"]["2048 untrained here"]["foretold"] = {"2048": errors}
    for name, (_, shares) in told.items():
        asked = zip(("dense", name), shares, strict=False)
        run["pieces"][f"2048 {name}"]["asked"] = {
            f"{task} | 2048 | {attention}": share
            for attention, share in asked
            for task in ("needle", "two facts")
        }
    printed = table([run])
    assert "Seed 3, 5 methods: rank correlation" in printed
    # By hand, of errors 1 2 3 4 5: ranks 5 3.5 3.5 2 1, and 5 2 3 4 1.
    assert f"asked densely {-9.5 / (10 * 9.5) ** 0.5:.2f}, asked as trained -0.60" in printed


@pytest.mark.parametrize("name", PROFILES)
def test_every_piece_begins_from_one_before_it(name: str) -> None:
    known: set[str | None] = {None}
    for piece in pieces(PROFILES[name]):
        assert piece.begins_from in known and piece.name not in known
        known.add(piece.name)


def test_the_methods_of_the_last_level_can_be_chosen() -> None:
    smoke = PROFILES["smoke"]
    chosen = [piece.name for piece in pieces(smoke, ["1 back", "exact"])]
    assert chosen == ["128 ordinary", "512 1 back", "512 exact"]


def test_an_unknown_method_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "run")
    monkeypatch.setattr("sys.argv", ["run.py", "smoke", "--folder", folder, "--method", "2 back"])
    with pytest.raises(SystemExit):
        main()
    assert (
        "--method: expected some of exact, 16 pages, 1 back, got 2 back" in capsys.readouterr().err
    )
    assert not Path(folder).exists()


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(seconds: float) -> list[str]:
        Run("smoke", tmp_path, 0, "cpu").go_on(time.perf_counter() + seconds)
        return capsys.readouterr().out.splitlines()

    assert run(1.0) == ["no time left for 128 ordinary"]
    run(1e6)
    path = tmp_path / "results-0.json"
    record = json.loads(path.read_text())
    assert list(record["pieces"]) == [piece.name for piece in pieces(PROFILES["smoke"])]
    sizes = [len(found["asked"]) for found in record["pieces"].values()]
    assert sizes == [1, 4, 4, 4]  # under dense attention, then under a budget too
    [foretold] = record["pieces"]["512 exact"]["foretold"].values()
    assert {name: list(told) for name, told in foretold.items()} == {
        "16 pages": ["gradient", "past"],
        "SpaCO 1/2": ["gradient", "bias", "noise"],
        "1 back": ["gradient"],
        "bf16 gradients": ["gradient"],
    }
    errors = {name: told["gradient"] for name, told in foretold.items()}
    assert errors.pop("bf16 gradients") == 0  # on a CPU keys are in fp32, and so are the pages
    assert all(error > 0 for error in errors.values())
    del record["pieces"]["512 exact"]["asked"]["needle | 1024 | dense"]
    path.write_text(json.dumps(record))
    assert run(1e6) == ["512 exact: needle | 1024 | dense: 0.00"]
    printed = table([json.loads(path.read_text())])
    record["pieces"]["512 exact"]["settings"]["stage"]["rate"] = 2e-3
    path.write_text(json.dumps(record))
    with pytest.raises(SystemExit, match=r"expected 512 exact of the profile's settings"):
        run(1e6)
    assert "512 exact, foretold at 512 tokens" in printed
    assert "Seconds in all, by seed: " in printed
    assert "1,024 tokens, 16 pages" in printed and "| 512 1 back |" in printed
    assert all(found["probes"] for found in record["pieces"].values())
