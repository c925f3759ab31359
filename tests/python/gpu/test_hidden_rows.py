"""What nobody sees may hold anything: NaN and infinity there change no bit of any result."""

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from attention_case import Case, Problem

from oomb import _C

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason="needs compute capability 9.0",
    ),
]

# Where the keys of each of two sequences end, given past and chunk: in the chunk, in the past.
ENDS: dict[str, Callable[[int, int], tuple[int, int]] | None] = {
    "everywhere": None,
    "in the chunk": lambda past, chunk: (past + chunk - 37, past + chunk // 2 + 3),
    "in the past": lambda past, chunk: (past - 70, past + 1),
}


@pytest.fixture(autouse=True)
def forced() -> Iterator[None]:
    _C.force_attention("sm90")
    yield
    _C.force_attention(None)


def poison(problem: Problem, value: float) -> int:
    """Overwrites keys and values that no row sees, the rest of the last page too, and rows that
    see nothing; pages behind a sequence's end are not there. How many keys before that rest."""
    c = problem.case
    seen = problem.visible()
    empty = ~seen.any(dim=-1)
    for rows in (problem.q, problem.d_o, problem.d_lse):
        rows[empty] = value
    hidden = ~seen.unflatten(1, (c.kv_heads, c.group)).any(dim=(2, 3))
    problem.k[hidden[:, :, c.past :]] = value
    problem.v[hidden[:, :, c.past :]] = value
    rest = c.pages * c.page_size - c.past
    assert rest > 0
    in_pages = torch.nn.functional.pad(hidden[:, :, : c.past], (0, rest), value=True)
    for b, page in itertools.product(range(c.batch), range(c.pages)):
        slot = problem.pool[int(problem.block_table[b, page])]
        slot[:, in_pages[b, :, page * c.page_size : (page + 1) * c.page_size]] = value
        if problem.num_keys is not None and page * c.page_size >= problem.num_keys[b]:
            problem.block_table[b, page] = -1
    return int(hidden.sum())


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("limits", [{}, {"window": 300}, {"documents": True}], ids=str)
@pytest.mark.parametrize("lists", ["dense", "shared", "per_head"])
@pytest.mark.parametrize(
    ("head_dim", "page_size"), list(itertools.product([64, 128, 256], [64, 128]))
)
def test_hidden_rows(
    head_dim: int, page_size: int, lists: str, limits: dict[str, int], ends: str
) -> None:
    for deterministic, value in [(True, float("nan")), (False, float("inf"))]:
        case = Case(
            head_dim=head_dim,
            page_size=page_size,
            chunk=300,
            past=7 * page_size + 17,
            lists=lists,
            batch=2,
            deterministic=deterministic,
            **limits,
        )
        problem = Problem(case)
        limit = ENDS[ends]
        if limit is not None:
            lengths = limit(case.past, case.chunk)
            problem.num_keys = torch.tensor(lengths, device="cuda", dtype=torch.int32)
        clean = problem.run().tensors()
        hidden = poison(problem, value)
        # With neither limits nor ends all keys may be seen; the rest of the last page is not.
        assert hidden > 0 or (ends == "everywhere" and not limits)
        for name, tensor in problem.run().tensors().items():
            if name == "dq" and not deterministic:  # its last bits vary
                torch.testing.assert_close(tensor, clean[name])
            else:
                assert torch.equal(tensor, clean[name]), f"{name}, {value}"
