"""What a run cannot use is named, ends it with a code, and leaves no run behind."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_runs import TEXT, prepare, run, save_model
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from oomb.cli.demo_tokenizer import byte_tokenizer
from oomb.train import arguments


def refused(folder: Path, *overrides: str, code: int = 2) -> str:
    file = folder / "run.yaml"
    result = run(file, *overrides)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert not (folder / "run").exists()
    return result.output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    prepare(tmp_path)
    return tmp_path


# Models -------------------------------------------------------------------------------------------


def remove_weights(folder: Path) -> None:
    (folder / "model" / "model.safetensors").unlink()


def pickle_weights(folder: Path) -> None:
    weights = folder / "model" / "model.safetensors"
    torch.save(load_file(weights), folder / "model" / "pytorch_model.bin")
    weights.unlink()


def drop_a_weight(folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})


def reshape_a_weight(folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] = torch.zeros(31)
    save_file(weights, file, metadata={"format": "pt"})


def truncate_weights(folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def break_config(folder: Path) -> None:
    (folder / "model" / "config.json").write_text('{"model_type": ')


def unknown_architecture(folder: Path) -> None:
    (folder / "model" / "config.json").write_text('{"model_type": "perceptron"}')


def code_of_its_own(folder: Path) -> None:
    file = folder / "model" / "config.json"
    config = json.loads(file.read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.MyConfig"}}
    file.write_text(json.dumps(config))
    (folder / "model" / "mine.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")


def remove_tokenizer(folder: Path) -> None:
    for file in (folder / "model").glob("tokenizer*"):
        file.unlink()


def break_tokenizer(folder: Path) -> None:
    (folder / "model" / "tokenizer.json").write_text("{}")


def larger_tokenizer(folder: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<more>")])
    tokenizer.save_pretrained(folder / "model")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_weights, "model.name: expected weights, got"),
        (pickle_weights, "expected weights as safetensors, got pytorch_model.bin, a pickle"),
        (drop_a_weight, "got none for 1 of them, model.layers.1.mlp.up_proj.weight"),
        (reshape_a_weight, "model.name: expected weights, got"),
        (truncate_weights, "model.name: expected weights, got"),
        (break_config, "model.name: expected a transformers model, got"),
        (unknown_architecture, "model.name: expected a transformers model, got"),
        (code_of_its_own, "runs only with model.trust_remote_code=true"),
        (remove_tokenizer, "model.tokenizer: expected a tokenizer, got"),
        (break_tokenizer, "model.tokenizer: expected a tokenizer, got"),
        (larger_tokenizer, "expected ids below the model's 256 embeddings, got ids up to 256"),
    ],
)
def test_unusable_models(folder: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(folder)
    assert message in refused(folder)
    assert not (folder / "ran").exists()


def test_a_model_that_is_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    near = refused(folder, f"model.name={folder / 'modle'}")
    assert "which does not exist; did you mean 'model'?" in near
    assert "expected a folder, got the file" in refused(folder, f"model.name={folder / 'text.txt'}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = refused(folder, "model.name=no-such-organisation/no-such-model")
    assert "model.name: expected a transformers model" in message
    assert "no folder here and not read from the hub" in message


def test_a_model_that_cannot_be_exact(folder: Path) -> None:
    save_model(folder / "model", attention_dropout=0.5)
    assert "dropout" in refused(folder)


def test_layers_that_adapters_do_not_find(folder: Path) -> None:
    message = refused(folder, "lora.target_modules='*_proj'")  # no regular expression
    assert "lora.target_modules: expected layers of the model, got '*_proj'" in message
    message = refused(folder, "lora.target_modules=[query]")
    assert "lora.target_modules: expected layers of the model, got ['query']" in message


@pytest.mark.parametrize(
    ("names", "got"),
    [
        ("embed_token", "'embed_token'; did you mean 'embed_tokens'?"),
        ("[lm_head, model.embed]", "'model.embed'; did you mean 'model.embed_tokens'?"),
        ("[score]", "'score'"),
        ("['']", "''"),
        ("[lora_A]", "'lora_A'"),
    ],
)
def test_modules_to_save_that_the_model_has_not(folder: Path, names: str, got: str) -> None:
    message = refused(folder, f"lora.modules_to_save={names}")
    expected = f"lora.modules_to_save: expected names of modules of the model, got {got}\n"
    assert message.endswith(f"\n{expected}")


def test_a_list_of_modules_is_not_saved_as_one(folder: Path) -> None:
    message = refused(folder, "lora.modules_to_save=layers")
    assert "lora.modules_to_save: expected modules that are called, got 'layers', a Modu" in message


@pytest.mark.parametrize("name", ["embed_tokens", "model.norm", "head"])  # peft takes any end
def test_modules_to_save_are_trained_whole(folder: Path, name: str) -> None:
    result = run(folder / "run.yaml", f"lora.modules_to_save={name}", "training.steps=1")
    assert result.exit_code == 0, result.output
    saved = load_file(folder / "run" / "model" / "adapter_model.safetensors")
    assert any(key.endswith(f"{name}.weight") for key in saved)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(folder: Path) -> None:
    assert "model.device: expected a GPU" in refused(folder, "model.device=cuda")


# Positions ----------------------------------------------------------------------------------------


def test_more_positions_than_the_model_has(folder: Path) -> None:
    message = refused(folder, "context=5000", "model.max_position_embeddings=500")
    assert "context: expected at most the model's 500 positions, got 5,000" in message
    assert "rope_type: yarn, factor: 10" in message


def test_packed_documents_need_their_own_positions_only(folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"text": "twenty characters ..."}\n' * 40)
    fits = ["data.arrange=packed", "model.max_position_embeddings=21", "training.steps=1"]
    train = f"data.train={folder / 'rows.jsonl'}"
    assert run(folder / "run.yaml", *fits, train).exit_code == 0


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ("{rope_type: yarn}", "model.rope.factor: expected a number for yarn, got none"),
        ("{rope_type: llama3, factor: 2.0}", "model.rope: expected parameters of llama3"),
        ("{rope_type: longrope, factor: 2.0}", "model.rope: expected parameters of longrope"),
        ("{rope_type: yran, factor: 2.0}", "did you mean 'yarn'?"),
    ],
)
def test_incomplete_scaling(folder: Path, rope: str, message: str) -> None:
    assert message in refused(folder, f"model.rope={rope}")


# Engine -------------------------------------------------------------------------------------------


def test_weights_are_not_sharded(folder: Path) -> None:
    message = refused(folder, "engine.sharded_weights=zero1")
    assert (
        "engine.sharded_weights: expected none, got 'zero1': say parallel.weights=zero1" in message
    )


# Data ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "data.train: expected text, got empty files"),
        (b"x", "data.train: expected at least two tokens of text, got 1"),
        (b"abc" * 20, "data.eval_fraction: expected at least two sequences to share, got one"),
        (b"\x80" * 99, "expected UTF-8 text"),
    ],
)
def test_unusable_text(folder: Path, text: bytes, message: str) -> None:
    (folder / "text.txt").write_bytes(text)
    assert message in refused(folder)


def test_missing_text(folder: Path) -> None:
    message = refused(folder, f"data.train={folder / 'texts.txt'}")
    assert "data.train: expected a file" in message and "did you mean 'text.txt'?" in message
    assert "data.eval: expected a file" in refused(
        folder, f"data.eval={folder / 'x'}", "data.eval_fraction=0"
    )


def test_a_tokenizer_without_the_tokens_asked_for(folder: Path) -> None:
    message = refused(folder, "data.add_eos=true")
    assert "expected a tokenizer with an EOS token" in message and "data.add_eos=false" in message
    assert "with a BOS token" in refused(folder, "data.add_bos=true")


def test_bos_as_the_tokenizer_does(folder: Path) -> None:
    from oomb.train.data import tokenising_rule
    from oomb.train.reading import read_settings

    backend = byte_tokenizer().backend_tokenizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="Ā", eos_token="ā")
    data = read_settings(folder / "run.yaml", ["data.add_eos=true"]).data
    assert tokenising_rule(data, tokenizer).before == ()
    forced = read_settings(folder / "run.yaml", ["data.add_bos=true"]).data
    assert tokenising_rule(forced, tokenizer).before == (0,)
    assert tokenising_rule(data, tokenizer).after == (1,)


def test_a_cache_that_cannot_be_written(folder: Path) -> None:
    message = refused(folder, f"data.cache_dir={folder / 'text.txt'}")
    assert "data.cache_dir: expected a folder that can take the data" in message


def test_a_disk_that_is_full_while_tokens_are_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("datasets.arrow_writer.ArrowWriter.write_table", full)
    message = refused(folder)
    assert "data.cache_dir: expected a folder that can take the data" in message
    assert "No space left on device" in message


def test_a_folder_of_data_that_cannot_be_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "texts" / "closed").mkdir(parents=True)
    (folder / "texts" / "a.txt").write_text(TEXT)
    own = Path.iterdir

    def iterdir(path: Path) -> Any:
        if path.name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return own(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    message = refused(folder, f"data.train={folder / 'texts'}")
    assert "data.train: expected folders that can be read" in message and "closed" in message


# The machine --------------------------------------------------------------------------------------


def test_what_does_not_fit_names_what_would(folder: Path) -> None:
    (folder / "text.txt").write_text(TEXT * 20)
    sizes = ["context=4096", "engine.device_memory=64KiB", "engine.host_memory=1MiB"]
    message = refused(folder, *sizes)
    assert "engine: expected what this machine holds" in message
    assert "nearest settings that fit" in message or "longest context that fits" in message


def test_optimizers_and_schedules_that_cannot_work(folder: Path) -> None:
    # Of a library that is not there; those of bitsandbytes are.
    assert "optimizer" in refused(folder, "optimizer.name=grokadamw", "training.steps=1")
    message = refused(folder, "schedule.name=cosine", "schedule.arguments.no_such=1")
    assert "schedule.arguments: expected those of cosine" in message


def test_an_output_folder_that_cannot_be(folder: Path) -> None:
    message = refused(folder, f"output_dir={folder / 'text.txt'}")
    assert "output_dir: expected a folder, got the file" in message
    assert "output_dir: expected a folder that can be" in refused(folder, "output_dir=/proc/no/run")


def test_trackers_that_are_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = refused(folder, "logging.report_to=tensorbord")
    assert "got 'tensorbord'; did you mean 'tensorboard'?" in message
    monkeypatch.setattr(arguments, "get_available_reporting_integrations", list)
    message = refused(folder, "logging.report_to=[wandb]")
    assert "'wandb', which is not; pip install wandb" in message
