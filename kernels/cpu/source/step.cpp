// The step that a thread computes, and its attention as an operator of torch.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "attention.h"

namespace draftline {

thread_local Step now;

void write_kv(const Call& call) {
  const int64_t pair = 2 * call.kv_heads * call.head_dim;
  const int32_t* slots = now.slots.const_data_ptr<int32_t>();
  for (int64_t row = 0; row < now.rows(); ++row)
    std::memcpy(call.kv + slots[row] * pair,
                call.heads + (row * call.all_heads + call.num_heads) * call.head_dim,
                pair * sizeof(float));
}

void advance_step(const at::Tensor& slots, const at::Tensor& positions) {
  TORCH_CHECK(now.kv.defined() && slots.size(0) == now.rows() && positions.size(0) == now.rows(),
              "advance_step: another step");
  now.slots = slots, now.positions = positions;
  const int32_t* slot = slots.const_data_ptr<int32_t>();
  for (Request& request : now.requests) {
    TORCH_CHECK(request.last - request.first == 1 && request.owns() == 1,
                "advance_step: a request of several rows");
    ++request.context;
    request.slots.push_back(slot[request.first]);
    request.own_positions = positions.const_data_ptr<int32_t>() + request.first;
    request.mask = nullptr;
  }
}

namespace {

void begin_step(const at::Tensor& kv, int64_t block_size, const at::Tensor& slots,
                const at::Tensor& positions, const at::Tensor& starts, const at::Tensor& contexts,
                const at::Tensor& tables, const at::Tensor& tree_starts, const at::Tensor& tree_slots,
                const at::Tensor& tree_positions, const at::Tensor& mask) {
  now = Step{kv, slots, positions, mask, tree_positions, {}};
  const int32_t* start = starts.const_data_ptr<int32_t>();
  const int32_t* tree = tree_starts.const_data_ptr<int32_t>();
  const uint8_t* visible = mask.const_data_ptr<uint8_t>();
  for (int64_t index = 0; index < contexts.size(0); ++index) {
    Request request{start[index], start[index + 1], contexts.const_data_ptr<int32_t>()[index]};
    const int64_t rows = request.last - request.first;
    if (rows == 0) continue;
    const int64_t owns = tree[index + 1] - tree[index];
    const int32_t* own_slots = slots.const_data_ptr<int32_t>() + request.first;
    request.own_positions = positions.const_data_ptr<int32_t>() + request.first;
    if (owns) {
      own_slots = tree_slots.const_data_ptr<int32_t>() + tree[index];
      request.own_positions = tree_positions.const_data_ptr<int32_t>() + tree[index];
      request.mask = visible;
      visible += rows * owns;
    }
    request.slots.resize(request.context + (owns ? owns : rows));
    const int32_t* table = tables.const_data_ptr<int32_t>() + index * tables.size(1);
    for (int64_t p = 0; p < request.context; p += block_size)
      for (int64_t i = 0; i < std::min(block_size, request.context - p); ++i)
        request.slots[p + i] = table[p / block_size] * static_cast<int32_t>(block_size) + i;
    std::copy_n(own_slots, owns ? owns : rows, request.slots.begin() + request.context);
    order_own_columns(request);
    now.requests.push_back(std::move(request));
  }
}

at::Tensor attend(const at::Tensor& heads, int64_t layer, int64_t num_heads, double scaling,
                  std::optional<int64_t> window, std::optional<double> softcap) {
  TORCH_CHECK(heads.dim() == 3 && heads.is_contiguous() && heads.scalar_type() == at::kFloat);
  TORCH_CHECK(now.kv.defined() && heads.size(0) == now.rows(), "attend: another step");
  const int64_t kv_heads = now.kv.size(3), head_dim = now.kv.size(4);
  TORCH_CHECK(heads.size(1) == num_heads + 2 * kv_heads && heads.size(2) == head_dim);
  at::Tensor out = at::empty({heads.size(0), num_heads * head_dim}, heads.options());
  const Call call{heads.const_data_ptr<float>(), out.data_ptr<float>(),
                  now.kv.data_ptr<float>() + layer * now.kv.stride(0),
                  now.positions.const_data_ptr<int32_t>(), num_heads, kv_heads, heads.size(1),
                  head_dim, static_cast<float>(scaling), window, softcap};
  write_kv(call);
  attend_step(call);
  return out;
}

}  // namespace
}  // namespace draftline

TORCH_LIBRARY_FRAGMENT(draftline, library) {
  library.def(
      "begin_step(Tensor kv, int block_size, Tensor slots, Tensor positions, Tensor starts, Tensor "
      "contexts, Tensor tables, Tensor tree_starts, Tensor tree_slots, Tensor tree_positions, Tensor "
      "mask) -> ()");
  library.def("advance_step(Tensor slots, Tensor positions) -> ()");
  library.def("end_step() -> ()", [] { draftline::now = draftline::Step{}; });
  library.def(
      "attend(Tensor heads, int layer, int num_heads, float scaling, int? window, float? softcap)"
      " -> Tensor");
}

TORCH_LIBRARY_IMPL(draftline, CPU, library) {
  library.impl("begin_step", &draftline::begin_step);
  library.impl("advance_step", &draftline::advance_step);
  library.impl("attend", &draftline::attend);
}
