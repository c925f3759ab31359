"""Layers of torchao's float8 recipe ``rowwise_with_gw_hp`` as three plain products.

    forward    y  = x8 @ w8.T       x8: a scale for each token; w8: one for each output
    backward   dx = dy8 @ v8        dy8: a scale for each token; v8: one for the whole weight
               dW += dy.T @ x       in the weights' dtype, added to its sum within the product

These are torchao's own casts and products. torchao keeps what it has cast in a class of tensors,
scales ``dx`` in a kernel behind the product, and casts an input anew for each layer that reads it;
that costs as much as products in float8 save.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import nn

from oomb.model import remade
from oomb.model.linear import WeightSums, takes_product

RECIPE = "rowwise_with_gw_hp"
SMALLEST_CAPABILITY = 89  # of a GPU with products in float8: 8.9
GPU_WANTED = "a GPU with products in float8 (RTX 4090, L40S, H100 or later)"
PRODUCT = "oomb::scaled_product"
_CODES = torch.float8_e4m3fn
_MULTIPLE = 16  # of both sizes of a layer: what these products take
_SETTINGS = (
    "cast_config_input",
    "cast_config_weight",
    "cast_config_grad_output",
    "cast_config_input_for_grad_weight",
    "cast_config_weight_for_grad_input",
    "cast_config_grad_output_for_grad_weight",
    "round_scales_to_power_of_2",
    "enable_fsdp_float8_all_gather",
)


def convert_linears(model: Any, recipe: str, *, emulate: bool = False) -> None:
    """Put torchao's layers in place of the decoder's linear ones; the head stays as it is.

    Args:
        recipe: of torchao, with scales of rows.
        emulate: products in the weights' dtype, of values rounded to float8.

    Raises:
        ImportError: torchao is not installed; the text says how to get it.
    """
    try:
        kinds: Any = import_module("torchao.float8")
    except ImportError as error:
        raise ImportError(
            "expected torchao to be installed; pip install 'oomb[torchao]'"
        ) from error
    config = kinds.Float8LinearConfig.from_recipe_name(recipe)
    # Products over tokens want a multiple of 16, and a last chunk has any number.
    config = replace(config, emulate=emulate, pad_inner_dim=not emulate)
    head = model.get_output_embeddings()

    def converts(module: nn.Module, _: str) -> bool:
        return (
            type(module) is nn.Linear
            and module is not head
            and module.in_features % _MULTIPLE == 0
            and module.out_features % _MULTIPLE == 0
        )

    kinds.convert_to_float8_training(model, config=config, module_filter_fn=converts)


def float8_forwards(
    causal: nn.Module, sums: WeightSums | None
) -> dict[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    """A forward for each such layer that nobody has compiled or replaced.

    Args:
        sums: takes weight gradients; None: autograd's usual way.
    """
    layers: list[Any] = [
        module
        for module in causal.modules()
        if type(module).__name__ == "Float8Linear"
        and "forward" not in vars(module)
        and module._compiled_call_impl is None
        and _is_of_recipe(module)
    ]
    inputs = _Inputs()
    return {layer: _Forward(layer, sums, inputs) for layer in layers}


def _is_of_recipe(layer: Any) -> bool:
    return all(getattr(layer.config, name) == getattr(_recipe(), name) for name in _SETTINGS)


@cache
def _recipe() -> Any:
    kinds: Any = import_module("torchao.float8")  # optional, and there: it made the layer
    return kinds.Float8LinearConfig.from_recipe_name(RECIPE)


class _Inputs:
    """The last input that was cast: q, k and v read one, and so do gate and up."""

    def __init__(self) -> None:
        self._last: Callable[[], torch.Tensor | None] = lambda: None
        self._version: int | None = None
        self._cast: tuple[torch.Tensor, torch.Tensor] | None = None

    def cast(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes [tokens, in] and scales [tokens] of x [..., in]."""
        version = None if x.is_inference() else x._version  # there nobody counts changes
        kept = self._last() is x and self._version == version is not None
        if self._cast is None or not kept:
            self._cast = None  # freed before the next one is made
            self._cast = rows_in_float8(x.detach().reshape(-1, x.shape[-1]))
            self._last, self._version = weakref.ref(x), version
        return self._cast


class _Forward:
    """A layer's forward, for one call of the engine."""

    def __init__(self, layer: Any, sums: WeightSums | None, inputs: _Inputs) -> None:
        self._layer, self._inputs, self._plain = layer, inputs, layer.forward
        self._sums = sums if sums is not None and takes_product(layer.weight, sums) else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        layer = self._layer
        if not self._has_products(x):
            y: torch.Tensor = self._plain(x)
            return y
        codes, scales = self._inputs.cast(x)
        apply: Callable[..., torch.Tensor] = _Products.apply
        return apply(x, layer.weight, layer.bias, codes, scales, layer.config, self._sums)

    def _has_products(self, x: torch.Tensor) -> bool:
        """Those of a GPU give bf16 alone, and not every GPU has them."""
        if torch.is_autocast_enabled(x.device.type) or self._layer.weight.dtype != x.dtype:
            return False
        return not x.is_cuda or (x.dtype == torch.bfloat16 and not self._layer.config.emulate)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        codes: torch.Tensor,
        scales: torch.Tensor,
        config: Any,
        sums: WeightSums | None,
    ) -> torch.Tensor:
        remade.keep(ctx, x, weight)
        ctx.weight, ctx.sums = weight, sums
        ctx.fast = config.gemm_config_grad_input.use_fast_accum
        fast = config.gemm_config_output.use_fast_accum
        y = scaled_product(codes, scales, *rows_in_float8(weight.detach()), bias, x.dtype, fast)
        whole: torch.Tensor = torch.ops.aten._unsafe_view(y, (*x.shape[:-1], weight.shape[0]))
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = remade.kept(ctx)
        d_y = grads[0].reshape(-1, weight.shape[0])
        d_x = d_weight = None
        if ctx.sums is not None:
            ctx.sums.add_product(ctx.weight, d_y, x.reshape(-1, x.shape[-1]))
        elif ctx.needs_input_grad[1]:
            d_weight = d_y.t() @ x.reshape(-1, x.shape[-1])
        if ctx.needs_input_grad[0]:
            codes, scales = rows_in_float8(d_y)
            factor = columns_in_float8(weight)
            d_x = scaled_product(codes, scales, *factor, None, x.dtype, ctx.fast).view(x.shape)
        d_bias = d_y.sum(0) if ctx.needs_input_grad[2] else None
        return d_x, d_weight, d_bias, None, None, None, None


@torch.library.custom_op("oomb::rows_in_float8", mutates_args=())
def rows_in_float8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [rows, width] and scales [rows] fp32 (what codes are multiplied by) of x [rows, width].

    Scales are powers of two. A row with a value that is not finite has the scale NaN.
    """
    if x.is_cuda:
        from oomb.model.float8_kernels import launch_rows  # Triton comes with CUDA builds

        codes, scales = _empty_rows(x)
        launch_rows(x.contiguous(), codes, scales)
        return codes, scales
    return _cast(x, x.abs().amax(1, keepdim=True))


@torch.library.custom_op("oomb::columns_in_float8", mutates_args=())
def columns_in_float8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [width, rows] of x [rows, width], by one scale of all, which is given width times."""
    if x.is_cuda:
        from oomb.model.float8_kernels import launch_columns  # the same

        codes, scales = _empty_columns(x)
        highest = torch.linalg.vector_norm(x, float("inf"))
        launch_columns(x.contiguous(), highest, codes, scales)
        return codes, scales
    codes, scales = _cast(x, x.abs().amax().view(1, 1))
    return codes.t().contiguous(), scales.repeat(x.shape[1])


@torch.library.custom_op(PRODUCT, mutates_args=())
def scaled_product(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    w: torch.Tensor,
    w_scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    fast: bool,
) -> torch.Tensor:
    """``x @ w.T + bias`` [rows, out] of codes x [rows, in] and w [out, in]; emulated on a CPU.

    Args:
        fast: add up in what tensor cores have, which is less than fp32.
    """
    if x.is_cuda:
        scales = {"scale_a": x_scales[:, None], "scale_b": w_scales[None]}
        made: torch.Tensor = torch._scaled_mm(
            x, w.t(), **scales, bias=bias, out_dtype=dtype, use_fast_accum=fast
        )
        return made
    wide = torch.promote_types(dtype, torch.float32)
    y = (x.to(wide) * x_scales[:, None]) @ (w.to(wide) * w_scales[:, None]).t()
    return (y if bias is None else y + bias).to(dtype)


def _cast(x: torch.Tensor, highest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    casts: Any = import_module("torchao.float8.float8_utils")
    scale = casts.amax_to_scale(highest, _CODES, round_scales_to_power_of_2=True)
    codes = casts.to_fp8_saturated(x.to(torch.float32) * scale, _CODES)
    return codes, scale.reciprocal().view(-1)


def _empty_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.empty(x.shape, dtype=_CODES, device=x.device)
    return codes, torch.empty(x.shape[0], dtype=torch.float32, device=x.device)


def _empty_columns(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.empty(x.shape[::-1], dtype=_CODES, device=x.device)
    return codes, torch.empty(x.shape[1], dtype=torch.float32, device=x.device)


rows_in_float8.register_fake(_empty_rows)
columns_in_float8.register_fake(_empty_columns)


@scaled_product.register_fake
def _(x: torch.Tensor, _: torch.Tensor, w: torch.Tensor, *others: Any) -> torch.Tensor:
    dtype = others[2]
    return torch.empty((x.shape[0], w.shape[0]), dtype=dtype, device=x.device)
