"""Settings: what is taken, what is refused, and whether the message helps."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

import oomb
from oomb.train.engine_settings import EngineSettings, SampledSettings, TopKSettings
from oomb.train.errors import BadInput
from oomb.train.reading import read_settings, write_settings
from oomb.train.settings import HubSettings, RunSettings

LEAST = """
output_dir: run
model: {name: some/model}
data: {train: a.txt}
context: 4096
"""


def read(tmp_path: Path, text: str = LEAST, *overrides: str) -> RunSettings:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return read_settings(file, overrides)


def refused(tmp_path: Path, *overrides: str, text: str = LEAST) -> str:
    with pytest.raises(BadInput) as caught:
        read(tmp_path, text, *overrides)
    return str(caught.value)


def test_the_least_is_four_fields(tmp_path: Path) -> None:
    settings = read(tmp_path)
    assert settings.data.train == ["a.txt"]
    assert settings.engine.made() == oomb.Config()


@pytest.mark.parametrize("field", ["output_dir", "model.name", "data.train", "context"])
def test_each_of_them_is_missed(tmp_path: Path, field: str) -> None:
    values = yaml.safe_load(LEAST)
    *sections, name = field.split(".")
    inner = values
    for section in sections:
        inner = inner[section]
    del inner[name]
    message = refused(tmp_path, text=yaml.safe_dump(values))
    assert message == f"{field}: expected a value, got none"


def test_engine_section_is_the_config() -> None:
    for section, config in (
        (EngineSettings, oomb.Config),
        (TopKSettings, oomb.TopKPages),
        (SampledSettings, oomb.SampledChunks),
    ):
        names = [field.name for field in fields(config)]
        assert [name for name in section.model_fields if name != "type"] == names
        meanings = [section.model_fields[name].description for name in names]
        assert all(meaning and len(meaning) > 8 for meaning in meanings)
    assert EngineSettings().made() == oomb.Config()


def test_every_engine_setting_arrives(tmp_path: Path) -> None:
    changed: dict[str, Any] = {
        "chunk_size": 512,
        "page_size": 64,
        "attention": {
            "type": "topk",
            "budget": 8,
            "share": "kv_head",
            "score": "token_softmax",
            "sink_pages": 1,
            "recent_pages": 2,
            "chunk_budget": 16,
        },
        "backward": {"type": "sampled", "keep": 0.5, "seed": 3, "cap": 2.0},
        "device_memory": "3GiB",
        "host_memory": 10**9,
        "kv_grad_dtype": "bfloat16",
        "main_grad_dtype": "bfloat16",
        "main_grad_device": "host",
        "recompute": "layer",
        "keep_outputs": 0.5,
        "weights": "host",
        "sharded_weights": "zero1",
        "rope_angles": "float64",
        "deterministic": False,
        "keep_main_grad": True,
        "check_finite": True,
        "record_selection": True,
        "divide_pages": True,
    }
    config = read(tmp_path, LEAST + yaml.safe_dump({"engine": changed})).engine.made()
    attention, backward = dict(changed["attention"]), dict(changed["backward"])
    del attention["type"], backward["type"]
    expected = {
        **changed,
        "attention": oomb.TopKPages(**attention),
        "backward": oomb.SampledChunks(**backward),
    }
    assert config == oomb.Config(**expected)
    beside_dense = {"head_groups": 2}
    config = read(tmp_path, LEAST + yaml.safe_dump({"engine": beside_dense})).engine.made()
    assert config == oomb.Config(head_groups=2)
    assert {field.name for field in fields(oomb.Config)} == changed.keys() | beside_dense
    for name, value in changed.items():
        assert expected[name] != getattr(oomb.Config(), name), (name, value)


def test_truncated_chunks_arrive(tmp_path: Path) -> None:
    settings = read(tmp_path, LEAST, "engine.backward={type: truncated, window: 2}")
    assert settings.engine.made().backward == oomb.TruncatedChunks(window=2)


def test_numbers_without_a_point_are_numbers(tmp_path: Path) -> None:
    settings = read(tmp_path, LEAST + "optimizer: {learning_rate: 3e-5, epsilon: 1E-8}\n")
    assert settings.optimizer.learning_rate == 3e-5
    assert read(tmp_path, LEAST, "optimizer.learning_rate=2e-4").optimizer.learning_rate == 2e-4


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        ("model.name=other", "model.name", "other"),
        ("model.revision=", "model.revision", None),
        ("data.train=[b.txt, c/*.txt]", "data.train", ["b.txt", "c/*.txt"]),
        ("data.eval=b.txt", "data.eval", ["b.txt"]),
        ("engine.attention=topk", "engine.attention.budget", 64),
        ("engine.recompute=none", "engine.recompute", "none"),
        ("training.steps=7", "training.steps", 7),
        ("context=128K", "context", 131072),
        ("context=0.5m", "context", 524288),
        ("lora={}", "lora.r", 16),
        ("lora.r=4", "lora.r", 4),
        ("model.rope={rope_type: yarn, factor: 4}", "model.rope.factor", 4),
        ("optimizer.arguments.momentum=0.9", "optimizer.arguments", {"momentum": 0.9}),
    ],
)
def test_overrides(tmp_path: Path, override: str, field: str, value: object) -> None:
    found: Any = read(tmp_path, LEAST, override)
    for name in field.split("."):
        found = getattr(found, name)
    assert found == value


def test_later_overrides_win_and_refine(tmp_path: Path) -> None:
    engine = read(
        tmp_path,
        LEAST,
        "engine.attention=topk",
        "engine.attention.budget=3",
        "context=8",
        "context=9",
    )
    assert engine.engine.made().attention == oomb.TopKPages(budget=3)
    assert engine.context == 9


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("modle.name=x", "modle: expected a known field, got 'modle'; did you mean 'model'?"),
        (
            "optimizer.learning_rat=1",
            "optimizer.learning_rat: expected a known field, got 'learning_rat'; "
            "did you mean 'learning_rate'?",
        ),
        (
            "engine.attention={type: topk, budgte: 3}",
            "engine.attention.budgte: expected a known field, got 'budgte'; did you mean 'budget'?",
        ),
        ("engine.attention={type: dense, budget: 3}", "got 'budget'; known are type"),
        ("engine.attention=tpok", "engine.attention.type: expected 'dense' or 'topk', got 'tpok'"),
        (
            "engine.attention.budget=3",
            "engine.attention.type: expected 'dense' or 'topk', got None",
        ),
        (
            "engine.attention={type: topk, budget: 0}",
            "engine.attention.budget: expected an int >= 1, got 0",
        ),
        (
            "engine.chunk_size=100",
            "engine.chunk_size: expected a multiple of page_size 128, got 100",
        ),
        ("engine.chunk_size=big", "engine.chunk_size: expected integer, got 'big'"),
        ("engine.device_memory=40Gx", "engine.device_memory: expected bytes or a size such as"),
        ("engine.device_memory=1.5", "engine.device_memory: expected integer or string, got 1.5"),
        ("engine=3", "engine: expected fields (chunk_size, "),
        ("optimizer.name=adamw_troch", "optimizer.name: expected a name that transformers knows"),
        ("schedule.name=cosin", "did you mean 'cosine'?"),
        ("optimizer.learning_rate=fast", "optimizer.learning_rate: expected number, got 'fast'"),
        ("optimizer.learning_rate=-1", "expected greater than or equal to 0, got -1"),
        ("model.dtype=bf16", "got 'bf16'; did you mean 'bfloat16'?"),
        ("context=1", "context: expected greater than or equal to 2, got 1"),
        ("context=4096.0", "context: expected integer, got 4096.0"),
        ("context=12Q", "context: expected integer, got '12Q'"),
        ("context=many M", "context: expected tokens such as 131072, 128K or 1M, got 'many M'"),
        ("context=0K", "context: expected tokens such as 131072, 128K or 1M, got '0K'"),
        ("data.train=[]", "data.train: expected at least 1 of them, got []"),
        ("model.trust_remote_code=1", "model.trust_remote_code: expected boolean, got 1"),
        ("evaluation.every_steps=3", "evaluation.every_steps: expected data.eval or"),
        ("training", "training: expected field=value"),
        ("data.train=3", "data.train: expected list, got 3"),
        ("data.train=[[a]]", "data.train.0: expected string or fields (dataset, subset, split,"),
        ("data.train=", "data.train: expected list, got None"),
        ("data.train=['']", "data.train.0: expected text"),
        ("data.train={datset: a}", "got 'datset'; did you mean 'dataset'?"),
        ("data.train={dataset: a, split: 3}", "data.train.0.split: expected string, got 3"),
        ("data.eval=[b, {split: a}]", "data.eval.1.dataset: expected a value, got none"),
        ("data.kind=chat", "data.kind: expected 'auto', 'text', 'messages', 'completion' or"),
        ("data.mesages_field=a", "got 'mesages_field'; did you mean 'messages_field'?"),
        ("model.name.of=x", "model.name.of: expected fields in model.name, got 'some/model'; "),
        ("context.most=x", "context.most: expected fields in context, got 4096; write"),
        ("evaluation.generate={prompts: a}", "evaluation.generate: expected data.eval or"),
        ("saving.push_to_hbu=a/b", "got 'push_to_hbu'; did you mean 'push_to_hub'?"),
    ],
)
def test_bad_values_are_named(tmp_path: Path, override: str, message: str) -> None:
    assert message in refused(tmp_path, override)


@pytest.mark.parametrize("entry", ["a.txt", "[a.txt, b.txt]"])
def test_a_file_has_no_fields_to_change(tmp_path: Path, entry: str) -> None:
    message = refused(tmp_path, f"data.train={entry}", "data.train.split=x")
    assert message == (
        f"data.train.split: expected fields in data.train, got {yaml.safe_load(entry)!r}; write "
        "data.train itself as fields to give it 'split'"
    )


def test_fields_of_a_data_set_are_changed_where_there_are_some(tmp_path: Path) -> None:
    changes = ["data.train={dataset: a}", "data.train.split=x", "data.eval.dataset=b"]
    data = read(tmp_path, LEAST, *changes).data
    assert data.train == [HubSettings(dataset="a", split="x")]
    assert data.eval == [HubSettings(dataset="b")]


def test_an_override_leaves_what_an_alias_shares(tmp_path: Path) -> None:
    text = LEAST + "optimizer: {arguments: &a {b: 1}}\nschedule: {arguments: *a}\n"
    settings = read(tmp_path, text, "optimizer.arguments.b=2")
    assert (settings.optimizer.arguments, settings.schedule.arguments) == ({"b": 2}, {"b": 1})


def test_the_home_folder_is_written_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "me"
    monkeypatch.setenv("HOME", str(home))
    text = LEAST.replace("a.txt", "[~/a.txt, {dataset: ~/b}, ~c, d~/e]")
    text = text.replace(": run", ": ~/run").replace("some/model", "~/model, tokenizer: ~/t")
    for settings in (
        read(tmp_path, text),
        read(tmp_path, text, "output_dir=~/run", "model.name=~/model", "data.cache_dir=~/cache"),
    ):
        assert settings.output_dir == f"{home}/run"
        assert (settings.model.name, settings.model.tokenizer) == (f"{home}/model", f"{home}/t")
        assert settings.data.train == [
            f"{home}/a.txt", HubSettings(dataset=f"{home}/b"), "~c", "d~/e"
        ]  # fmt: skip
    assert settings.data.cache_dir == f"{home}/cache"
    assert read(tmp_path).model.name == "some/model"


def test_every_bad_field_is_named_at_once(tmp_path: Path) -> None:
    lines = refused(tmp_path, "context=0", "modle=x", "engine.page_size=x").splitlines()
    assert {line.split(":")[0] for line in lines} == {"context", "modle", "engine.page_size"}


def test_data_sets_of_the_hub_stand_beside_files(tmp_path: Path) -> None:
    train = "data.train=[a.txt, {dataset: some/set, split: 'train[:9]'}]"
    found = read(tmp_path, LEAST, train)
    file, hub = found.data.train
    assert file == "a.txt" and not isinstance(hub, str)
    assert (hub.dataset, hub.split, hub.subset) == ("some/set", "train[:9]", None)
    write_settings(found, tmp_path / "again.yaml")
    assert read_settings(tmp_path / "again.yaml") == found


def test_a_misspelt_field_of_a_data_set_is_one_line(tmp_path: Path) -> None:
    message = refused(tmp_path, "data.train={dataset: a, splt: b}")
    expected = "data.train.0.splt: expected a known field, got 'splt'; did you mean 'split'?"
    assert message == expected


def test_held_out_twice_is_refused(tmp_path: Path) -> None:
    message = refused(tmp_path, "data.eval=b.txt", "data.eval_fraction=0.1")
    assert message.startswith("data.eval_fraction: expected 0")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "expected YAML, got expected the node content"),
        ("a:\n\tb: 1", "that cannot start any token in line 2"),
        ("- a", "expected fields, got list"),
        ("", "expected fields, got NoneType"),
        (LEAST + "context: 5\n", "context: expected once, got it again in line 6"),
        (b"\xff\xfe\x00".decode("latin-1"), "expected YAML"),
    ],
)
def test_broken_files(tmp_path: Path, text: str, message: str) -> None:
    assert message in refused(tmp_path, text=text)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no\.yaml: expected a YAML file, got No such file"):
        read_settings(tmp_path / "no.yaml")


def test_yaml_makes_no_objects(tmp_path: Path) -> None:
    message = refused(tmp_path, text="output_dir: !!python/object/apply:os.getcwd []")
    assert "expected YAML" in message


def test_written_settings_read_the_same(tmp_path: Path) -> None:
    settings = read(
        tmp_path, LEAST, "lora.r=4", "engine.attention=topk", "engine.backward=sampled",
        "optimizer.learning_rate=1e-5", "model.rope.rope_theta=1e7", "output_dir=größe"
    )  # fmt: skip
    write_settings(settings, tmp_path / "again.yaml")
    assert read_settings(tmp_path / "again.yaml") == settings


def test_every_field_is_described() -> None:
    def sections(section: Any) -> None:
        for name, field in section.model_fields.items():
            inner = re.findall(r"\w+Settings", str(field.annotation))
            assert field.description or inner, f"{section.__name__}.{name}"

    sections(RunSettings)
