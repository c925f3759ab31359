"""Which CUDA implementation runs, and what is refused."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attention_case import Case, Problem

from oomb import _C

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def unforced():
    yield
    _C.force_attention(None)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("sm80", Case(dtype=torch.float32)),
        ("sm80", Case(head_dim=80)),
        ("sm80", Case(page_size=32)),
        ("sm80-small", Case()),
        ("sm90", Case(dtype=torch.float16)),
        ("sm90", Case(head_dim=96)),
        ("sm90", Case(softcap=50.0)),
    ],
    ids=str,
)
def test_forcing_what_cannot_take_the_call(name: str, case: Case) -> None:
    _C.force_attention(name)
    with pytest.raises(ValueError, match=f"OOMB_ATTENTION.*head dim {case.head_dim}.*got {name}"):
        Problem(case).forward()


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="sm90, sm80, sm80-small or plain, got fast"):
        _C.force_attention("fast")


def test_head_dim_too_large() -> None:
    with pytest.raises(ValueError, match="head_dim: expected 1 to 512, got 513"):
        Problem(Case(head_dim=513, chunk=8)).forward()


def test_implementations_agree() -> None:
    case = Case(chunk=300, past=700)
    _C.force_attention("plain")
    plain = Problem(case).run().tensors()
    for name in (None, "sm80"):
        _C.force_attention(name)
        for field, value in Problem(case).run().tensors().items():
            error = (value.float() - plain[field].float()).abs().max().item()
            assert error <= 0.02 * plain[field].abs().max().item(), (name, field, error)


NOT_RESIDENT = """
import sys
sys.path.insert(0, sys.argv[2])
import torch
from attention_case import Case, Problem
from oomb import _C
_C.force_attention(sys.argv[1] or None)
problem = Problem(Case(chunk=70, past=300))
problem.block_table[0, 1] = -1
problem.forward()
try:
    torch.cuda.synchronize()
except RuntimeError:
    sys.exit(7)
"""


@pytest.mark.parametrize("name", ["", "sm80", "plain"], ids=["chosen", "sm80", "plain"])
def test_page_that_is_not_resident(name: str) -> None:
    """The launch fails: such a page must never be read as if it held something."""
    folder = str(Path(__file__).parent)
    command = [sys.executable, "-c", NOT_RESIDENT, name, folder]
    assert subprocess.run(command, capture_output=True, timeout=120).returncode == 7


WEIGHTS_OF_FP32 = """
import sys, warnings
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
import oomb

sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 64}
heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
model = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads)).cuda()
ids = torch.randint(64, (1, 512), device="cuda")
warnings.filterwarnings("error", "attention with")
with oomb.Engine(model, oomb.Config(chunk_size=128, page_size=64)) as engine:
    with torch.autocast("cuda", torch.bfloat16, enabled=sys.argv[1] == "autocast"):
        try:
            engine.forward_backward(ids, ids)
        except RuntimeWarning as warning:
            print(warning)
"""


@pytest.mark.parametrize(("precision", "warnings"), [("autocast", 0), ("fp32", 1)])
def test_warning_is_about_the_step(precision: str, warnings: int) -> None:
    """And not about the engine's first check of a model, which is of the weights' precision."""
    run = subprocess.run(
        [sys.executable, "-c", WEIGHTS_OF_FP32, precision],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("has no fast kernel") == warnings


def test_one_warning_for_the_plain_kernels() -> None:
    code = NOT_RESIDENT.split("_C.force")[0] + (
        "import warnings\n"
        "problem = Problem(Case(head_dim=80, chunk=70, past=30))\n"
        "warnings.simplefilter('error')\n"
        "try:\n    problem.forward()\n"
        "except RuntimeWarning as warning:\n    print(warning)\n"
        "problem.forward()\n"  # not a second time
    )
    folder = str(Path(__file__).parent)
    run = subprocess.run(
        [sys.executable, "-c", code, "", folder], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("head dim 80") == 1
    assert run.stderr == ""
