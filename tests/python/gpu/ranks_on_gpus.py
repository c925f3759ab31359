"""Run by torchrun on GPUs that share sequences: compares them with one GPU."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

import oomb
from engine.image_models import batch_of, make_with_images
from engine.latent_models import make_latent
from engine.recurrent_models import nothing_rounds_to_float32
from oomb.core.attention import ChunkAttention
from oomb.core.chunk_run import ChunkRun
from oomb.engine.lent import on_first
from oomb.hf.optimizer_files import OptimizerFiles
from oomb.parallel.group import Ranks
from oomb.parallel.job import Job
from parallel.plain_reader import states

PAGE, CHUNK, TOKENS, VOCABULARY, HEAD_DIM = 64, 256, 1500, 512, 64
SLOT = 2 * PAGE * HEAD_DIM * 2
RANKS = int(os.environ["WORLD_SIZE"])

SETTINGS: dict[str, dict[str, Any]] = {
    "dense": {},
    "recomputed": {"recompute": "layer"},
    "two tiers": {"device_memory": 80 * SLOT, "host_memory": "64MiB"},
    "kept": {"keep_outputs": "all"},
    "pages": {"attention": oomb.TopKPages(budget=4), "record_selection": True},
    "groups": {"head_groups": 2},
    "groups, recomputed": {"head_groups": 2, "recompute": "layer"},
    "groups, kept, two tiers": {
        "head_groups": 2,
        "keep_outputs": 0.5,
        "device_memory": 80 * SLOT,
        "host_memory": "64MiB",
    },
    "copies": {},
    "copies, pages": {"attention": oomb.TopKPages(budget=4, share="kv_head")},
    "copies, divided": {"divide_pages": True},
    "copies, divided, two tiers": {
        "divide_pages": True,
        "keep_outputs": "none",
        "device_memory": 40 * SLOT,
        "host_memory": "64MiB",
    },
    "copies, divided, pages": {
        "divide_pages": True,
        "attention": oomb.TopKPages(budget=4),
        "record_selection": True,
    },
    "pages that spill": {
        "attention": oomb.TopKPages(budget=4),
        "device_memory": 80 * SLOT,
        "host_memory": "64MiB",
    },
}


def make_model(dtype: torch.dtype, *, copies: bool = False) -> Qwen2ForCausalLM:
    """
    Args:
        copies: one key/value head, which all ranks hold; ranks have unequal numbers of queries.
    """
    torch.manual_seed(0)
    queries, keys = (4 * RANKS - 1, 1) if copies else (4 * RANKS, 2 * RANKS)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=queries,
        num_key_value_heads=keys,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096,
    )
    return Qwen2ForCausalLM(config).to(device="cuda", dtype=dtype)


def train(model: Any, ids: torch.Tensor, mesh: Any, settings: dict[str, Any]) -> Any:
    model.zero_grad(set_to_none=True)
    config = oomb.Config(chunk_size=CHUNK, page_size=PAGE, **settings)
    with oomb.Engine(model, config, mesh=mesh) as engine:
        step = engine.forward_backward(ids, ids)
    return step, [p.grad.clone() for p in model.parameters()]


def error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((x.double() - y.double()).norm() / y.double().norm()) for x, y in pairs)


def compare(mesh: Any, say: Any) -> None:
    """Gradients of ranks beside those of one GPU."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (1, TOKENS), generator=generator).cuda()
    for name, settings in SETTINGS.items():
        own = settings | (
            {"device_memory": 80 * RANKS * SLOT} if "device_memory" in settings else {}
        )
        exact = None
        for dtype in (torch.float32, torch.bfloat16):
            model = make_model(dtype, copies="copies" in name)
            alone, one = train(model, ids, None, own)
            step, ours = train(model, ids, mesh, settings)
            again, repeated = train(model, ids, mesh, settings)
            where = f"{name}, {dtype}"
            same = all(torch.equal(x, y) for x, y in zip(ours, repeated, strict=True))
            say(same and torch.equal(step.loss, again.loss), f"{where}: two runs differ in bits")
            if "head_groups" in settings:
                whole, at_once = train(model, ids, mesh, settings | {"head_groups": 1})
                same = all(torch.equal(x, y) for x, y in zip(ours, at_once, strict=True))
                say(same and torch.equal(step.loss, whole.loss), f"{where}: bits of one group")
            if dtype == torch.float32:
                exact = one
                away = error(ours, one)
                say(away <= 2e-3, f"{where}: {away:.1e} from one GPU")
            elif "pages" not in name:  # roundings may choose other pages
                assert exact is not None
                mine, theirs = error(ours, exact), error(one, exact)
                say(mine <= 1.2 * theirs, f"{where}: error {mine:.1e}, of one GPU {theirs:.1e}")
                apart = abs(float(step.loss) - float(alone.loss))
                say(apart <= 1e-3 * float(alone.loss), f"{where}: losses {apart:.1e} apart")


def _with_images(family: str) -> tuple[Any, Any, dict[str, Any]]:
    sizes: dict[str, Any] = {"head_dim": 64, "max_position_embeddings": 4096}
    if family == "qwen3-vl":
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 8, 8]}
        sizes["rope_parameters"] = {**rope, "mrope_interleaved": True}
    side = 2 if family == "gemma3" else 8
    rows = [[(60 + 200 * n, side, side) for n in range(4)], [(250, side, side)]]
    given = batch_of(family, rows, 900)
    return make_with_images(family, **sizes), given.input_ids, given.arguments


def other_families(mesh: Any, say: Any) -> None:
    """Pages of latents, and images among tokens: in fp64, and in bf16 beside one GPU's error."""
    ids = torch.arange(1500).mul(37).remainder(95)[None]
    families: dict[str, Any] = {
        name: lambda name=name: (make_latent(name, torch.float64), ids, {})
        for name in ("deepseek-v3", "glm-4.7-flash")
    }
    families |= {name: lambda name=name: _with_images(name) for name in ("qwen3-vl", "gemma3")}
    for name, make in families.items():
        found: dict[tuple[torch.dtype, str], dict[str, torch.Tensor]] = {}
        for dtype in (torch.float64, torch.bfloat16):
            for where, place in (("one", None), ("ranks", mesh)):
                model, tokens, others = make()
                model.to("cuda", dtype)
                given = {
                    key: x.to("cuda", dtype if x.is_floating_point() else x.dtype)
                    for key, x in others.items()
                }
                config = oomb.Config(chunk_size=CHUNK, page_size=PAGE)
                wide = nothing_rounds_to_float32() if dtype == torch.float64 else nullcontext()
                with wide, oomb.Engine(model, config, mesh=place) as engine:
                    engine.forward_backward(tokens.cuda(), tokens.cuda(), **given)
                trained = [(key, p.grad) for key, p in model.named_parameters()]
                found[dtype, where] = {k: g.double() for k, g in trained if g is not None}
        exact = found[torch.float64, "one"]
        errors = {
            key: max(float((x[n] - y).norm() / y.norm()) for n, y in exact.items() if y.any())
            for key, x in found.items()
        }
        away = errors[torch.float64, "ranks"]
        say(away <= 1e-10, f"{name}, fp64: {away:.1e} from one GPU")
        mine, theirs = (errors[torch.bfloat16, where] for where in ("ranks", "one"))
        say(mine <= 1.3 * theirs, f"{name}, bf16: error {mine:.1e}, of one GPU {theirs:.1e}")


def two_passes(mesh: Any, say: Any) -> None:
    """Any loss of values, on ranks and on one GPU."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(VOCABULARY, (2, TOKENS), generator=generator).cuda()
    ids[1, : TOKENS // 2] = ids[0, : TOKENS // 2]
    for share in (False, True):
        found = []
        for place in (None, mesh):
            model = make_model(torch.float32)
            config = oomb.Config(chunk_size=CHUNK, page_size=PAGE)
            arguments: dict[str, Any] = {"entropies": True, "share_prefixes": share}
            with (
                oomb.Engine(model, config, mesh=place) as engine,
                engine.two_pass(ids, **arguments) as call,
            ):
                (call.logprobs.mean(1).sigmoid().sum() + call.entropies.square().mean()).backward()
                call.sweep()
            found.append([p.grad for p in model.parameters()])
        away = error(found[1], found[0])
        say(away <= 2e-3, f"two passes, tree: {share}: {away:.1e} from one GPU")


def shared_weights(mesh: Any, say: Any) -> None:
    """Sharded weights beside one GPU's, gradient sums on the host, and one rank's generation."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(VOCABULARY, (1, TOKENS), generator=generator).cuda()
    alone = make_model(torch.float32)
    _, expected = train(alone, ids, None, {})
    limits: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    written = alone.generate(input_ids=ids[:, :40], **limits)
    notes = Ranks(list(range(RANKS)), torch.device("cpu"))
    for policy in ("zero1", "zero2", "zero3"):
        found = {}
        for place in ("device", "host") if policy != "zero1" else ("device",):
            model: Any = make_model(torch.float32)
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            settings: dict[str, Any] = {"sharded_weights": policy, "main_grad_device": place}
            config = oomb.Config(chunk_size=CHUNK, page_size=PAGE, **settings)
            with oomb.Engine(model, config, mesh=mesh) as engine:
                engine.forward_backward(ids, ids)
                found[place] = [p.grad.full_tensor() for p in model.parameters()]
                away = error(found[place], expected)
                say(away <= 2e-3, f"{policy}, sums on the {place}: {away:.1e} from one GPU")
                for at_once in (False, True):

                    def write(model: Any = model) -> torch.Tensor:
                        tokens: torch.Tensor = model.generate(input_ids=ids[:, :40], **limits)
                        return tokens

                    ours = on_first(engine, notes, write, at_once=at_once)
                    right = ours is None if dist.get_rank() else torch.equal(ours, written)  # type: ignore[arg-type]
                    say(right, f"{policy}, at once: {at_once}: another generation")
                model.zero_grad(set_to_none=True)
                engine.forward_backward(ids, ids)
                again = [p.grad.full_tensor() for p in model.parameters()]
            same = all(torch.equal(x, y) for x, y in zip(again, found[place], strict=True))
            say(same, f"{policy}, sums on the {place}: other bits after a generation")
        if len(found) == 2:
            pairs = zip(found["device"], found["host"], strict=True)
            same = all(torch.equal(x, y) for x, y in pairs)
            say(same, f"{policy}: sums on the host have other bits")


def checkpoints(mesh: Any, say: Any) -> None:
    """Rows of an optimizer on GPUs, written by all, read again by ours and by torch's reader."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(VOCABULARY, (1, TOKENS), generator=generator).cuda()
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    place = Path(folder[0])
    found: dict[str, dict[str, torch.Tensor]] = {}
    config = oomb.Config(chunk_size=CHUNK, page_size=PAGE, sharded_weights="zero3")
    job = Job()
    for name in ("written", "loaded", "by torch"):
        model: Any = make_model(torch.bfloat16)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if name == "by torch":
            found[name] = states(model, str(place))
            continue
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if name == "written":
            with oomb.Engine(model, config, mesh=mesh) as engine:
                engine.forward_backward(ids, ids)
            optimizer.step()
            OptimizerFiles(optimizer, model, job).save(place)
        else:
            optimizer.load_state_dict(OptimizerFiles(optimizer, model, job).load(place, copy=True))
        found[name] = {
            f"{parameter}.{key}": value.full_tensor() if isinstance(value, DTensor) else value
            for parameter, owner in model.named_parameters()
            for key, value in optimizer.state[owner].items()
        }
    moments = [value for key, value in found["written"].items() if key.endswith("exp_avg")]
    say(len(moments) > 0 and all(x.any() for x in moments), "a moment was not written")
    for name in ("loaded", "by torch"):
        same = found[name].keys() == found["written"].keys() and all(
            torch.equal(value.cpu(), found[name][key].cpu())
            for key, value in found["written"].items()
        )
        say(same, f"a checkpoint's optimizer, {name}: other states")
    job.close()
    if dist.get_rank() == 0:
        shutil.rmtree(place)


def fail_once(mesh: Any, say: Any) -> None:
    """Rank 1 fails in the middle of a sweep; all raise, and the next call has the bits."""
    ids = torch.arange(TOKENS).remainder(VOCABULARY)[None].cuda()
    model = make_model(torch.bfloat16)
    backward = ChunkAttention.backward

    def failing(self: ChunkAttention, run: ChunkRun, layer: int, *tensors: Any) -> Any:
        if dist.get_rank() == 1 and (layer, run.chunk) == (1, 2):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return backward(self, run, layer, *tensors)

    config = oomb.Config(chunk_size=CHUNK, page_size=PAGE)
    with oomb.Engine(model, config, mesh=mesh) as engine:
        engine.forward_backward(ids, ids)
        expected = [p.grad.clone() for p in model.parameters()]
        ChunkAttention.backward = failing  # type: ignore[method-assign]
        text = "no error"
        try:
            engine.forward_backward(ids, ids)
        except oomb.OutOfMemoryError as raised:
            text = str(raised)
        finally:
            ChunkAttention.backward = backward  # type: ignore[method-assign]
        say(text.startswith("[rank 1] torch needed"), f"a failing rank: {text}")
        kept = [p.grad for p in model.parameters()]
        same = all(torch.equal(x, y) for x, y in zip(kept, expected, strict=True))
        say(same, "a failing rank: gradients changed")
        model.zero_grad(set_to_none=True)
        engine.forward_backward(ids, ids)
        found = [p.grad for p in model.parameters()]
        same = all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
        say(same, "a failing rank: the next call has other bits")


def come_late(mesh: Any, say: Any) -> None:
    """Rank 1's GPU comes late to each sum, the last exchange of a step among them."""
    ids = torch.arange(TOKENS).remainder(VOCABULARY)[None].cuda()
    add, waited = Ranks.sum, []

    def late(self: Ranks, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            torch.cuda._sleep(400_000_000)  # 0.2 s
        return add(self, x)

    config = oomb.Config(chunk_size=CHUNK, page_size=PAGE)
    with oomb.Engine(make_model(torch.bfloat16), config, mesh=mesh) as engine:
        for add_up in (add, add, late):  # the first call connects
            Ranks.sum = add_up  # type: ignore[method-assign]
            try:
                step = engine.forward_backward(ids, ids)
            finally:
                Ranks.sum = add  # type: ignore[method-assign]
            waited.append(step.stats.exchange_seconds)
    more = waited[2] - waited[1]
    say(dist.get_rank() == 1 or more > 0.1, f"waited {more:.3f} s more for a rank that is late")


def main() -> int:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cuda:nccl,cpu:gloo", timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cuda", (RANKS,), mesh_dim_names=("cp",))
    wrong: list[str] = []

    def say(right: bool, text: str) -> None:
        print(f"rank {rank} {'ok   ' if right else 'WRONG'} {text}", flush=True)
        if not right:
            wrong.append(text)

    compare(mesh, say)
    other_families(mesh, say)
    two_passes(mesh, say)
    shared_weights(mesh, say)
    checkpoints(mesh, say)
    come_late(mesh, say)
    fail_once(mesh, say)
    dist.destroy_process_group()
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
