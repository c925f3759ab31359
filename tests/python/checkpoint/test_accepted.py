"""What a checkpoint holds, and which ones a run resumes from."""

from __future__ import annotations

import shutil
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.modules.module import _IncompatibleKeys
from transformers import AutoModelForCausalLM

from engine.models import make
from oomb.checkpoint import CheckpointError
from oomb.hf import Trainer
from trainer.runs import CONFIG, arguments, logged, model, packed

from .runs import StopsAfter, trainer


def test_what_a_checkpoint_holds(tmp_path: Path) -> None:
    """A model that from_pretrained loads, and no pickle."""
    full = trainer(tmp_path / "full", network=lambda _: model(), max_steps=1)
    full.train()
    path = full.checkpoint_store().path_of(1)
    assert sorted(file.name for file in path.iterdir()) == [
        "COMPLETE",
        "MANIFEST.json",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "optimizer",
        "trainer_state.json",
        "training-00001.safetensors",
        "training.json",
        "training_args.json",
    ]
    assert sorted(file.name for file in (path / "optimizer").iterdir()) == [
        "optimizer-00001.safetensors",
        "optimizer.json",
    ]
    loaded = AutoModelForCausalLM.from_pretrained(path)
    for mine, theirs in zip(full.model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    full.save_model(str(tmp_path / "model"))
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert not list(tmp_path.rglob("*.bin")) + list(tmp_path.rglob("*.pt*"))

    lora = trainer(tmp_path / "lora", max_steps=1)
    lora.train()
    path = lora.checkpoint_store().path_of(1)
    base = peft.PeftModel.from_pretrained(model(), path)
    own = {name: p for name, p in lora.model.named_parameters() if "lora" in name}
    found = {name: p for name, p in base.named_parameters() if "lora" in name}
    assert len(own) == len(found) > 0
    assert all(torch.equal(own[name], found[name]) for name in own)
    assert "base_model" not in str(list(path.iterdir()))


def test_the_newest_intact_one_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = trainer(tmp_path / "run", callbacks=[StopsAfter(4)])
    whole.train()
    damaged = whole.checkpoint_store().path_of(4) / "training.json"
    damaged.write_bytes(damaged.read_bytes().replace(b"1", b"2", 1))
    resumed = trainer(tmp_path / "run", seed=1, callbacks=[StopsAfter(4)])
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed, "loss") == logged(whole, "loss")
    assert resumed.checkpoint_store().newest_intact().step == 4  # type: ignore[union-attr]


def test_tied_weights_are_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They lie in the file once; what really is missing is still said."""
    said: list[str] = []
    log = transformers.logging.get_logger("transformers.trainer")
    monkeypatch.setattr(log, "warning", lambda text, *_: said.append(str(text)))

    def tied(steps: int) -> Trainer:
        settings = arguments(tmp_path, save_strategy="steps", save_steps=2, max_steps=steps)
        network = make("qwen3-tied", torch.float32)
        return Trainer(network, settings, train_dataset=packed(), oomb_config=CONFIG)

    tied(2).train()
    resumed = tied(3)
    resumed.train(resume_from_checkpoint=True)
    assert "missing keys" not in str(said)
    lacking = tmp_path / "lacking"
    shutil.copytree(resumed.checkpoint_store().path_of(2), lacking)
    weights = load_file(lacking / "model.safetensors")
    save_file(
        {name: x for name, x in weights.items() if name != "model.norm.weight"},
        lacking / "model.safetensors",
        {"format": "pt"},
    )
    resumed._weights_from = str(lacking)
    gone = _IncompatibleKeys(["lm_head.weight", "model.norm.weight"], [])
    resumed._issue_warnings_after_load(gone)
    assert "missing keys in the checkpoint model loaded: ['model.norm.weight']" in str(said)


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    first = trainer(tmp_path)
    message = r"^resume_from_checkpoint: expected an intact checkpoint in .*, got none$"
    with pytest.raises(CheckpointError, match=message):
        first.train(resume_from_checkpoint=True)
    trainer(tmp_path, callbacks=[StopsAfter(1)]).train()
    (first.checkpoint_store().path_of(1) / "training.json").write_text("")
    with pytest.raises(CheckpointError, match=r"got step-00000001 training.json: expected \d+ by"):
        first.train(resume_from_checkpoint=True)
    with pytest.raises(CheckpointError, match="nowhere: is not a folder$"):
        first.train(resume_from_checkpoint=str(tmp_path / "nowhere"))


def test_another_model(tmp_path: Path) -> None:
    trainer(tmp_path, callbacks=[StopsAfter(1)]).train()
    other = trainer(tmp_path, network=lambda _: model())
    with pytest.raises(CheckpointError, match="step-00000001 is of another model: parameters: "):
        other.train(resume_from_checkpoint=True)
    path = other.checkpoint_store().path_of(1)
    with pytest.raises(CheckpointError, match="is of another model: parameters: expected "):
        other.train(resume_from_checkpoint=str(path))


def test_pickles_are_refused(tmp_path: Path) -> None:
    """A checkpoint of the stock trainer, or one with a pickle put beside its files."""
    run = trainer(tmp_path, callbacks=[StopsAfter(1)])
    run.train()
    path = run.checkpoint_store().path_of(1)
    torch.save({"a": 1}, path / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"optimizer\.pt: is a pickle, which may run code"):
        trainer(tmp_path).train(resume_from_checkpoint=str(path))


def test_a_checkpoint_of_the_stock_trainer(tmp_path: Path) -> None:
    settings = arguments(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    transformers.Trainer(model(), settings, train_dataset=packed()).train()
    run = trainer(tmp_path / "ours", network=lambda _: model())
    with pytest.raises(CheckpointError, match=r"checkpoint-1: [a-z_]+\.\w+: is a pickle"):
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_a_folder_that_has_checkpoints_already(tmp_path: Path) -> None:
    trainer(tmp_path, callbacks=[StopsAfter(1)]).train()
    message = "^output_dir: expected one without checkpoints, or resume_from_checkpoint=True, got "
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path).train()
    trainer(tmp_path, save_strategy="no", callbacks=[StopsAfter(1)]).train()


def test_a_checkpoint_of_the_model_only(tmp_path: Path) -> None:
    trainer(tmp_path, save_only_model=True, callbacks=[StopsAfter(1)]).train()
    with pytest.raises(CheckpointError, match=r"holds the model only \(save_only_model\)"):
        trainer(tmp_path).train(resume_from_checkpoint=True)
