// A product with a packed weight: the interface of `linear.cpp`.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace draftline {

// A packed weight: float32, or bfloat16 where that holds the same values.
struct Weight {
  const void* data;
  bool is_half;

  // Of a contiguous tensor [panels, inputs, PANEL] for so many inputs and outputs.
  static Weight of(const at::Tensor& packed, int64_t inputs, int64_t outputs);
};

// out = x @ weight + bias, and then + residual; [rows, outputs], rows one behind the other.
struct Product {
  const float* x;  // [rows, inputs]
  Weight weight;
  float* out;
  int64_t rows, inputs, outputs;
  const float* bias = nullptr;
  const float* residual = nullptr;  // [rows, outputs]; not `out`
};

void multiply(const Product& product);

}  // namespace draftline
