"""What images take around a call: their tower on tensors without memory."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from oomb.errors import UnsupportedModelError
from oomb.model.causal import CausalModel
from oomb.model.images import (
    features_of,
    propagate_features,
    taken_by_decoder,
    trains_images,
)
from oomb.model.swap import entered
from oomb.trace.autocast import autocast_of_device, autocast_state
from oomb.trace.meter import Work, tensors_of
from oomb.trace.stand_ins import TracedMeter, TracedSums

_LARGE_IMAGE = 1024  # tokens, of Qwen's: about a megapixel
PADDED_IMAGE = 280  # that Gemma 4's processor pads each image to
_KINDS = ("mm_token_type_ids", "token_type_ids")
_INDEXED = {
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
}


def _attention(q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return int(sdpa_flop_count(q, k, v))


def _attention_backward(
    grad: Any, q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any
) -> int:
    return int(sdpa_backward_flop_count(grad, q, k, v))


# Tensors without memory are CPU tensors, of whose attention torch's counter does not know.
_ATTENTION_OF_CPU = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


@dataclass(frozen=True)
class TowerUse:
    """Bytes and work of a call's images, beside parameters and what a call on text takes.

    Attributes:
        pixel_bytes: of what the model's forward is given for them, and of positions on axes.
        before_bytes: of torch's memory on the device, until features lie in the host's.
        after_bytes: likewise, while their gradients reach what trains; with the sums of these.
        sum_bytes: those sums; part of ``after_bytes``.
        feature_bytes: of the host's memory: features of all images, once.
        trains: gradients reach something before the decoder.
        work: of all runs; products are those of attention and convolutions too.
    """

    pixel_bytes: int = 0
    before_bytes: int = 0
    after_bytes: int = 0
    sum_bytes: int = 0
    feature_bytes: int = 0
    trains: bool = False
    work: Work = field(default_factory=Work)

    def host_bytes(self, ranks: int = 1) -> int:
        """Of the host's memory: all features, a rank's own rows, and likewise of gradients."""
        own = self.feature_bytes + -(-self.feature_bytes // ranks)
        return 2 * own if self.trains else own


class Tower:
    """Runs the tower of one model; every number of tokens once, with autocast and without.

    Args:
        bare: the model, with parameters that are fake tensors of ``mode``.
        device_type: as of :class:`oomb.trace.trace.Tracer`.
    """

    def __init__(self, bare: nn.Module, mode: FakeTensorMode, device_type: str) -> None:
        self._bare, self._mode, self._device_type = bare, mode, device_type
        self._uses: dict[tuple[Any, ...], TowerUse] = {}

    def use(self, image_tokens: int, num_tokens: int, main_grad_dtype: str) -> TowerUse:
        """Of a call that has ``num_tokens`` tokens, of which ``image_tokens`` show images.

        Raises:
            ValueError: there are not so many tokens, or the model sees no images.
            UnsupportedModelError: it cannot be told what the model's forward takes, or that cannot
                be run without values.
        """
        if image_tokens == 0:
            return TowerUse()
        if not 0 < image_tokens <= num_tokens:
            raise ValueError(
                f"image_tokens: expected 0 ... {num_tokens:,}, the tokens that there are, got "
                f"{image_tokens:,}"
            )
        key = image_tokens, num_tokens, main_grad_dtype, *autocast_state(self._device_type)
        if key not in self._uses:
            self._uses[key] = self._run(image_tokens, num_tokens, main_grad_dtype)
        return self._uses[key]

    def _run(self, image_tokens: int, num_tokens: int, main_grad_dtype: str) -> TowerUse:
        bare = CausalModel(self._bare)
        images = ShownImages.on(bare, image_tokens, num_tokens)
        ids, shown = images.ids, images.shown
        with self._mode:
            given: dict[str, Any] = {"pixel_values": torch.empty(images.pixels), **images.beside}
        pixels = sum(x.nbytes for x in given.values())
        given |= dict.fromkeys(("attention_mask", "position_ids"))
        meter = TracedMeter()
        products = FlopCounterMode(display=False, custom_mapping=_ATTENTION_OF_CPU)
        sums = TracedSums(self._device_type, meter, main_grad_dtype)
        trained = [p for p in bare.causal.parameters() if p.requires_grad]
        with entered(
            torch.random.fork_rng(devices=[]),
            autocast_of_device(self._device_type),
            self._mode,
            _KnownWhereGiven(),  # type: ignore[no-untyped-call]
            sums.collecting(trained),
            meter,
            products,
        ):

            def done() -> Work:
                return replace(meter.work, flops=float(products.get_total_flops()))

            try:
                with torch.no_grad():
                    taken = taken_by_decoder(bare, ids, given)
                    features = features_of(taken, shown)
                before, size = meter.peak_bytes, sum(x.nbytes for x in features)
                positions = taken.keywords.get("position_ids")
                if positions is not None and positions.ndim == 3:
                    pixels += positions.nbytes
                use = TowerUse(pixels, before, feature_bytes=size, work=done())
                if not trains_images(bare):
                    return use
                gradients = [torch.empty_like(x) for x in features]
                del taken, features
                # On a CPU they are those that the host has.
                on_device = size if self._device_type == "cuda" else 0
                meter.peak_bytes = meter.live_bytes
                propagate_features(bare, ids, given, shown, gradients)
                return replace(
                    use,
                    after_bytes=meter.peak_bytes - size + on_device,
                    sum_bytes=sum(x.nbytes for x in sums.of(trained, reached=True)),
                    trains=True,
                    work=done(),
                )
            except (RuntimeError, TypeError, AttributeError, LookupError) as error:
                raise UnsupportedModelError(
                    f"{type(bare.causal).__name__}: its images cannot be planned without running "
                    f"it: {error}"
                ) from error


class _KnownWhereGiven(TorchDispatchMode):
    """Runs with values what no weight and no pixel goes into: grids, positions, masks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(isinstance(x, FakeTensor) for x in tensors_of((args, kwargs))):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func in _INDEXED:
            args = (args[0], list(_numbers(args[1])), *args[2:])
        return func(*args, **kwargs)


def _numbers(index: Any) -> Iterator[Any]:
    """Masks as the places that they choose: without values nobody knows how many."""
    for x in index:
        if isinstance(x, torch.Tensor) and x.dtype == torch.bool and not isinstance(x, FakeTensor):
            with unset_fake_temporarily():
                yield from x.nonzero(as_tuple=True)
        else:
            yield x


@dataclass(frozen=True)
class ShownImages:
    """Images as a processor gives them, behind a token of text each.

    Attributes:
        ids: [1, T] int64; of text they are 0.
        shown: [1, T] bool: where images stand.
        pixels: shape of ``pixel_values``, fp32.
        beside: what else the model's forward is given, without a pixel.
    """

    ids: torch.Tensor
    shown: torch.Tensor
    pixels: tuple[int, ...]
    beside: dict[str, torch.Tensor]

    @staticmethod
    def on(model: CausalModel, image_tokens: int, num_tokens: int) -> ShownImages:
        """Large ones that ``image_tokens`` tokens show, and a small one for what is left.

        Raises:
            ValueError: the model sees none.
            UnsupportedModelError: it takes them in another way than those of docs/vision.md.
        """
        config: Any = model.causal.config
        taken = inspect.signature(type(model.causal).forward).parameters
        tower, name = getattr(config, "vision_config", None), type(model.causal).__name__
        if tower is None or "pixel_values" not in taken:
            raise ValueError(f"image_tokens: expected 0 for a model that sees no images: {name}")
        if "image_grid_thw" in taken:
            tokens, pixels, beside = _of_grids(tower, image_tokens)
        elif "image_position_ids" in taken:
            tokens, pixels, beside = _of_places(tower, image_tokens)
        elif (each := tokens_of_square(config)) is not None:
            tokens, beside = [each] * -(-image_tokens // each), {}
            pixels = len(tokens), tower.num_channels, tower.image_size, tower.image_size
        else:
            raise UnsupportedModelError(f"{name}: it is not known how it takes images")
        ids = torch.zeros(1, max(num_tokens, sum(tokens) + len(tokens)), dtype=torch.int64)
        begin = 1
        for number in tokens:
            ids[0, begin : begin + number] = config.image_token_id
            begin += number + 1
        shown = ids == config.image_token_id
        beside |= {kind: shown.int() for kind in _KINDS if kind in taken}
        return ShownImages(ids, shown, pixels, beside)


_Shapes = tuple[list[int], tuple[int, ...], dict[str, torch.Tensor]]  # tokens of each image first


def _of_grids(tower: Any, image_tokens: int) -> _Shapes:
    """Qwen: patches of all images behind one another."""
    tokens, side = _divided(image_tokens, _LARGE_IMAGE), tower.spatial_merge_size
    values = tower.temporal_patch_size * tower.in_channels * tower.patch_size**2
    grids = torch.tensor([(1, side, side * number) for number in tokens])
    return tokens, (int(grids.prod(-1).sum()), values), {"image_grid_thw": grids}


def _of_places(tower: Any, image_tokens: int) -> _Shapes:
    """Gemma 4: patches of each image, filled up to a number."""
    tokens, side = _divided(image_tokens, PADDED_IMAGE), tower.pooling_kernel_size
    places = torch.full((len(tokens), PADDED_IMAGE * side**2, 2), -1)
    for image, number in zip(places, tokens, strict=True):
        grid = torch.cartesian_prod(torch.arange(side * number), torch.arange(side))
        image[: len(grid)] = grid
    pixels = (*places.shape[:2], 3 * tower.patch_size**2)
    return tokens, pixels, {"image_position_ids": places}


def tokens_of_square(config: Any) -> int | None:
    """Of images that are all made squares of one size: Gemma 3, tiles of Llama 4."""
    tower = config.vision_config
    if hasattr(tower, "pixel_shuffle_ratio"):
        return int((tower.image_size // tower.patch_size * tower.pixel_shuffle_ratio) ** 2)
    number: int | None = getattr(config, "mm_tokens_per_image", None)
    return number


def _divided(tokens: int, most: int) -> list[int]:
    whole, rest = divmod(tokens, most)
    return [most] * whole + [rest] * (rest > 0)
