"""Reference log-probs that DPO and KTO compute ahead of training, beside TRL's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import trl

import oomb
import oomb.hf
from oomb.hf import fused_head

from .runs import CONFIG, tokenizer
from .two_pass_runs import (
    compare,
    judged,
    model,
    preferences,
    settings,
)
from .two_pass_runs import (
    plain_log_softmax as plain_log_softmax,
)

pytestmark = pytest.mark.filterwarnings("error:two_pass. another call")


@pytest.fixture
def nothing_cached() -> Iterator[None]:
    """Otherwise the second trainer would read what the first has computed."""
    datasets.disable_caching()
    yield
    datasets.enable_caching()


@pytest.mark.usefixtures("nothing_cached")
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("task", ["dpo", "kto"])
@pytest.mark.sampled(2)
def test_references_computed_ahead_of_training(
    task: str, adapted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, ours, kind, data = {
        "dpo": (trl.DPOTrainer, oomb.hf.DPOTrainer, trl.DPOConfig, preferences()),
        "kto": (trl.KTOTrainer, oomb.hf.KTOTrainer, trl.KTOConfig, judged()),
    }[task]
    asked: list[bool] = []
    values = fused_head.FusedHead._values

    def seen(self: Any, keywords: Any) -> Any:
        asked.append(torch.is_grad_enabled())
        return values(self, keywords)

    monkeypatch.setattr(fused_head.FusedHead, "_values", seen)

    def args() -> Any:
        size = settings(tmp_path, per_device_train_batch_size=2)
        return kind(**size, max_length=64, precompute_ref_log_probs=True)

    compare(stock, ours, args, data, adapted, with_reference=not adapted)
    first_step = asked.index(True)
    assert first_step >= 4 and not any(asked[:first_step])  # all batches, before training


def test_references_of_other_settings_are_not_those_of_the_cache(tmp_path: Path) -> None:
    """TRL finds them by rows and weights; pages that are chosen, for one, change them too."""
    preferences(2).save_to_disk(str(tmp_path / "rows"))
    sparse = oomb.Config(chunk_size=8, page_size=4, attention=oomb.TopKPages(budget=1))

    def computed(config: oomb.Config, **options: Any) -> list[float]:
        args = trl.DPOConfig(**settings(tmp_path), precompute_ref_log_probs=True, **options)
        trainer = oomb.hf.DPOTrainer(
            model(False),
            args=args,
            train_dataset=datasets.load_from_disk(str(tmp_path / "rows")),
            processing_class=tokenizer(),
            oomb_config=config,
        )
        trainer.engine.close()
        return list(trainer.train_dataset["ref_chosen_logps"])

    dense = computed(CONFIG)
    assert computed(sparse) != dense
    assert computed(CONFIG, ld_alpha=0.5) != dense
