"""The blocks of docs/recipes.md run one after the other, and do what the text says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from oomb.cli.demo_model import small_model
from oomb.cli.demo_tokenizer import byte_tokenizer

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
BLOCKS = re.findall(r"^## ([^\n]+)\n|^```python\n(.*?)^```", PAGE, re.S | re.M)


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What is defined at the end, and by heading what was then."""
    folder = tmp_path_factory.mktemp("recipes")
    torch.manual_seed(0)
    small_model().save_pretrained(folder / "oomb-demo" / "model")
    byte_tokenizer().save_pretrained(folder / "oomb-demo" / "model")
    now: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HF_HUB_OFFLINE", "1")
        heading = "start"
        for title, block in BLOCKS:
            heading = title or heading
            if block:
                exec(compile(block, f"recipes.md, {heading}", "exec"), now)
                now[heading] = {n: v for n, v in now.items() if n.islower()}
    return now


def test_every_recipe_ran(names: dict[str, Any]) -> None:
    headings = [title for title, _ in BLOCKS if title]
    assert len(headings) >= 8
    assert all(heading in names for heading in headings)


def test_a_step_learns_from_every_token_but_the_first(names: dict[str, Any]) -> None:
    step = names["One document per step"]["step"]
    assert step.num_valid_tokens == 2999
    assert step.loss == pytest.approx(torch.tensor(256.0).log().item(), abs=0.3)


def test_packed_documents_have_the_loss_of_each(names: dict[str, Any]) -> None:
    """On the model as the recipe's was then; the divisor is that of accumulation."""
    from oomb import Config, Engine

    now = names["Packed documents"]
    torch.manual_seed(0)
    model = small_model()
    with Engine(model, Config(chunk_size=1024)) as engine:
        alone = sum(
            engine.evaluate(one, one, num_items_in_batch=now["total"]).loss
            for one in now["documents"]
        )
        packed = engine.evaluate(now["packed"], now["packed"], document_ids=now["document_ids"])
    assert packed.num_valid_tokens == now["total"]
    torch.testing.assert_close(packed.loss, torch.as_tensor(alone))


def test_resuming_gives_the_states_back(names: dict[str, Any]) -> None:
    now = names["Saving and resuming"]
    assert now["newest"].step == 1
    assert now["state"]["engine"] == now["engine"].state_dict()
    assert now["state"]["optimizer"]["state"]


def test_evaluation_and_plan(names: dict[str, Any]) -> None:
    assert names["plan"].device_bytes > 0
    assert 100 < names["perplexity"] < 600
    assert names["worst"].shape == (1,)
