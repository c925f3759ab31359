"""``oomb train`` on a base in 4 or 8 bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_runs import prepare, run


@pytest.mark.parametrize(
    ("quantization", "library"), [("nf4", "bitsandbytes"), ("int8", "torchao.quantization")]
)
def test_adapters_over_a_quantized_base_are_trained_and_saved(
    tmp_path: Path, quantization: str, library: str
) -> None:
    pytest.importorskip(library)
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    file = prepare(
        tmp_path, lora={"r": 4}, model={"quantization": quantization, "dtype": "float32"}
    )
    done = run(file)
    assert done.exit_code == 0, done.output
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model = PeftModel.from_pretrained(base, tmp_path / "run" / "model")
    trained = [p for name, p in model.named_parameters() if "lora_B" in name]
    assert trained and all(bool((p != 0).any()) for p in trained)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"quantization": "nf4"}}, "model.quantization: expected the section lora"),
        ({"lora": {"r": 4}, "model": {"quantization": "int4"}}, "model.quantization"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    done = run(prepare(tmp_path, **change))
    assert done.exit_code == 2
    assert message in done.output
