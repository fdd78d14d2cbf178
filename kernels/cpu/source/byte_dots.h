// Products with weights of integers, or of e2m1, by dot products of bytes: codes times digits of the
// inputs.
#pragma once

#include <cstdint>

#include "linear.h"
#include "vectors.h"

namespace draftline {

// Columns of a panel of these weights.
constexpr int64_t DOT_COLUMNS = 2 * LANES;
// Inputs that share an exponent and belong to one group of the weight.
constexpr int64_t CHUNK = 32;

constexpr int64_t chunks_of(int64_t inputs) { return (inputs + CHUNK - 1) / CHUNK; }

// Bytes of a chunk of a panel.
constexpr int64_t chunk_bytes(Kind kind) {
  return DOT_COLUMNS * CHUNK / (kind == Kind::DOT8 ? 1 : 2);
}

// A chunk of a row as integers of 24 bits: x = step * (65536 * digits[2] + 256 * digits[1] +
// digits[0]), rounded to `step`, a power of two of at most 2^-22 of the largest input. Of rough
// inputs, which have 8 bits: x = step * digits[0], and `high` is 0.
struct alignas(64) Digits {
  int8_t digits[3][CHUNK];
  // 256 * high + low is the sum of the integers.
  int32_t high, low;
  float step;  // NaN, with digits of 0, beside an input that is not finite
  float sum;   // of the inputs
};

// [chunks, rows] of `x` [rows, inputs], for chunks `begin` to `end`.
void split_inputs(const float* x, int64_t rows, int64_t inputs, int64_t begin, int64_t end,
                  bool is_rough, Digits* to);

// A product with one weight; `out`, `bias` and `residual` are of its first output.
struct Part {
  const float* x;
  const Digits* digits;  // [chunks, rows] of x, for weights that this file multiplies
  Weight weight;
  float* out;
  int64_t rows, inputs, outputs;
  int64_t stride;  // from row to row of `out` and `residual`
  const float *bias, *residual;
  bool is_rough;
};

// The outputs of a panel of a weight of kind DOT8, DOT4 or DOT_E2M1.
void multiply_panel(const Part& part, int64_t panel);

}  // namespace draftline
