"""Published models by name, without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.models import make
from oomb.trace.bare import bare_model
from oomb.trace.published import PUBLISHED, model_name, published_config


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss 20B", "GPT-OSS-20B"])
def test_a_name_as_people_write_it(name: str) -> None:
    config: Any = published_config(name)
    assert (config.model_type, config.num_hidden_layers, config.num_local_experts) == (
        "gpt_oss",
        24,
        32,
    )


def test_settings_in_place_of_the_models_own() -> None:
    config: Any = published_config("gpt-oss-20b", num_hidden_layers=2)
    assert (config.num_hidden_layers, config.num_local_experts) == (2, 32)


def test_an_unknown_name() -> None:
    assert published_config("gpt-oss-2b") is None
    with pytest.raises(ValueError, match=r"docs/models\.md, got 'gpt-oss-2b'.*'gpt-oss-20b'"):
        bare_model("gpt-oss-2b")


def test_names_differ() -> None:
    assert len({model_name(name) for name in PUBLISHED}) == len(PUBLISHED)


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    published: Any = bare_model("minicpm3-4b")
    assert published.config.num_hidden_layers == 62
    make("llama").config.save_pretrained(tmp_path / "minicpm3-4b")
    own: Any = bare_model("minicpm3-4b")
    assert own.config.model_type == "llama"
