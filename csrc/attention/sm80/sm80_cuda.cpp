#include "attention/aligned.h"
#include "attention/sm80/backward.h"
#include "attention/sm80/forward.h"
#include "attention/sm80/kernels.h"
#include "attention/sm80/sm80.h"
#include "common/error.h"

namespace oomb::attention::sm80 {
namespace {

template <typename Params>
bool supported(const Params& p) {
  const bool type = p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16;
  const int64_t dim = p.shape.head_dim, page = p.shape.page_size;
  return type && takes_head_dim(dim) && (page == 64 || page == 128) && aligned(p.q, p.q_strides) &&
         aligned(p.k, p.k_strides) && aligned(p.v, p.v_strides) && aligned(p.o, p.o_strides) &&
         reinterpret_cast<uintptr_t>(p.past.kv_pool) % 16 == 0 && p.past.kv_slot_bytes % 16 == 0;
}

}  // namespace

bool forward_supported(const ForwardParams& params) { return supported(params); }

bool backward_supported(const BackwardParams& params) {
  const DType gradients = params.grads.dtype;
  return supported(params) && aligned(params.d_o, params.do_strides) &&
         aligned(params.dq, params.dq_strides) && aligned(params.dk, params.dk_strides) &&
         aligned(params.dv, params.dv_strides) &&
         (gradients == DType::kFloat32 || gradients == DType::kBFloat16) &&
         reinterpret_cast<uintptr_t>(params.grads.dkv_pool) % 16 == 0 &&
         params.grads.dkv_unit_bytes % 16 == 0;
}

void forward(const ForwardParams& params, TileSize size) {
  if (params.shape.batch == 0 || params.shape.chunk == 0) return;
  if (params.dtype == DType::kFloat16) {
    forward_float16(params, size);
  } else {
    forward_bfloat16(params, size);
  }
}

int64_t forward_workspace_bytes(const ForwardParams& params, TileSize size) {
  if (params.shape.batch == 0 || params.shape.chunk == 0) return 0;
  return params.dtype == DType::kFloat16 ? forward_workspace_float16(params, size)
                                         : forward_workspace_bfloat16(params, size);
}

int64_t backward_workspace_bytes(const BackwardParams& params) {
  return BackwardPlan(params, nullptr).bytes;
}

void backward(const BackwardParams& params, TileSize size) {
  if (params.shape.batch == 0 || params.shape.chunk == 0) return;
  const BackwardPlan plan(params, params.workspace);
  expect(params.workspace_bytes >= plan.bytes, "workspace",
         concat("at least ", plan.bytes, " bytes"), params.workspace_bytes);
  const bool half = params.dtype == DType::kFloat16;
  if (params.first_wave) half ? delta_float16(params) : delta_bfloat16(params);
  make_plan(params, plan);
  if (plan.in_one_pass) {
    half ? one_pass_float16(params, plan) : one_pass_bfloat16(params, plan);
    return;
  }
  half ? dkv_float16(params, plan, size) : dkv_bfloat16(params, plan, size);
  half ? dq_float16(params, size) : dq_bfloat16(params, size);
}

}  // namespace oomb::attention::sm80
