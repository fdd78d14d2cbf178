// A product with a packed weight: the interface of `linear.cpp`.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>

namespace draftline {

// How the numbers of a packed weight are kept. Those after BFLOAT16 are codes of a quantised weight.
enum class Kind {
  FLOAT32,
  BFLOAT16,
  INT8,
  INT8_MINIMA,
  E4M3,
  E2M1,
  UINT8,
  UINT4,
  UINT4_MINIMA,
  // By `byte_dots.h`.
  DOT8,
  DOT4,
  DOT_E2M1
};

// In which scales are kept, and minima.
enum class Scales { FLOAT32, FLOAT16, E8M0 };

// A packed weight, as `kernels/cpu/packed_linear.py` describes it.
struct Weight {
  Kind kind;
  const uint8_t* codes;  // [panels, inputs, PANEL] of the kind
  // Of quantised weights: [panels, groups, PANEL], zeros of UINT8 and UINT4 alone, minima of
  // the kinds that are named so. DOT8 and DOT4 have one of these or none.
  const void* scales = nullptr;
  const uint8_t* zeros = nullptr;
  const void* minima = nullptr;
  const int32_t* groups = nullptr;  // [inputs], of DOT8, DOT4 and DOT_E2M1 [chunks]
  int64_t num_groups = 0;
  // Minima likewise. FLOAT16 of DOT8, DOT4 and DOT_E2M1 alone.
  Scales scale_type = Scales::FLOAT32;

  // Of its tensors, for so many inputs and outputs.
  static Weight of(at::TensorList parts, int64_t inputs, int64_t outputs);
};

// Tensors of a packed weight.
constexpr int64_t PARTS = 5;

// Packed weights of the same inputs, whose outputs lie side by side.
struct Weights {
  static constexpr int64_t MOST = 3;
  Weight parts[MOST];
  int64_t outputs[MOST];  // of each
  int64_t count = 0;

  // Of the tensors of as many weights as `outputs`. Where the others have no codes, the first has
  // the outputs of all.
  static Weights of(at::TensorList tensors, int64_t inputs, at::IntArrayRef outputs);
};

// out = x @ weights + bias, and then + residual; [rows, outputs], rows one behind the other.
struct Product {
  const float* x;  // [rows, inputs]
  Weights weights;
  float* out;
  int64_t rows, inputs, outputs;
  const float* bias = nullptr;
  const float* residual = nullptr;  // [rows, outputs]; not `out`
  // Inputs may be rounded to 8 bits where that makes dot products of bytes fewer.
  bool is_rough = false;
};

void multiply(const Product& product);

}  // namespace draftline
