// A step's attention over a paged KV cache: the interface of `attention.cpp`.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace draftline {

// One request of a step. Its context's column c is at position c; its own columns come behind, in
// the order of `own`.
struct Request {
  int64_t first, last;            // its rows of the step
  int64_t context;                // columns that all its rows see
  const uint8_t* mask;            // [rows, own columns]; null: each row sees those up to itself
  std::vector<int32_t> slots;     // of all columns
  std::vector<int32_t> own;       // the mask's column of each own column
  const int32_t* own_positions;   // of the mask's columns

  int64_t columns() const { return slots.size(); }
  int64_t owns() const { return columns() - context; }

  int64_t position(int64_t column) const {
    return column < context ? column : own_positions[own[column - context]];
  }
};

// The step that a thread computes, between `begin_step` and `end_step`.
struct Step {
  at::Tensor kv;  // [layers, slots, 2, kv_heads, head_dim]
  at::Tensor slots, positions, mask, tree_positions;  // kept while requests point into them
  std::vector<Request> requests;

  int64_t rows() const { return slots.size(0); }
};

extern thread_local Step now;

// Sorts a request's own columns into the order of attention.
void order_own_columns(Request& request);

// Advances a step of requests with one row each: the old rows become context of the next ones,
// int32 [requests] each.
void advance_step(const at::Tensor& slots, const at::Tensor& positions);

// One layer's attention: heads [rows, all heads, head_dim], rotated, to out [rows, heads * dim].
struct Call {
  const float* heads;
  float* out;
  float* kv;                 // of the layer
  const int32_t* positions;  // of the rows
  int64_t num_heads, kv_heads, all_heads, head_dim;
  float scaling;
  std::optional<int64_t> window;
  std::optional<double> softcap;

  int64_t share() const { return num_heads / kv_heads; }
};

// Stores keys and values of the step's rows.
void write_kv(const Call& call);

void attend_step(const Call& call);

}  // namespace draftline
