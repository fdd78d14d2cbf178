// A product with a packed weight: the interface of `linear.cpp`.
#pragma once

#include <cstdint>

namespace draftline {

// out = x @ weight + bias, and then + residual; [rows, outputs], rows one behind the other.
struct Product {
  const float* x;  // [rows, inputs]
  const float* weight;
  float* out;
  int64_t rows, inputs, outputs;
  const float* bias = nullptr;
  const float* residual = nullptr;  // [rows, outputs]; not `out`
};

void multiply(const Product& product);

}  // namespace draftline
