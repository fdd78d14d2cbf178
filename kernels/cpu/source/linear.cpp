// A product with a matrix that lies in panels of PANEL columns, [panels, inputs, PANEL], the last
// one padded with zeros. Weights of 16 bits are widened in registers, so that their sums are those of
// the same weights in 32 bits, at half the bytes to read.
//
// A row's sums run over the inputs in order, with one rounding each, for any number of rows and
// threads. So a row's result is bitwise independent of the other rows. Few rows are bound by
// reading the weight once; for many, a part of a panel stays in the cache while they pass.
#include "linear.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "team.h"
#include "vectors.h"

namespace draftline {
namespace {

// As many rows as have registers for the sums of one panel.
constexpr int64_t ROWS = 6;
// Inputs of a panel that stay in the second-level cache while all rows pass.
constexpr int64_t DEPTH = 512;
// Prefetch distance in a panel, in inputs.
constexpr int64_t AHEAD = 16;
// Least number of multiplications for a thread.
constexpr int64_t GRAIN = 1 << 16;

constexpr int64_t CACHE_LINE = 64;

inline Vector widened(const float* from) { return load(from); }

inline Vector widened(const uint16_t* from) { return load_half(from); }

// Adds the products with the inputs from `first` to before `last`, whose weights begin at `weight`.
template <int R, typename W>
void add_rows(const Product& p, int64_t row, int64_t panel, int64_t first, int64_t last,
              const W* weight) {
  const float* x = p.x + row * p.inputs;
  float* out = p.out + row * p.outputs + panel * PANEL;
  const int64_t width = std::min(PANEL, p.outputs - panel * PANEL);
  Vector sums[R][VECTORS] = {};
  if (first > 0) {
    for (int r = 0; r < R; ++r)
      __builtin_memcpy(&sums[r][0], out + r * p.outputs, width * sizeof(float));
  } else if (p.bias) {
    for (int r = 0; r < R; ++r)
      __builtin_memcpy(&sums[r][0], p.bias + panel * PANEL, width * sizeof(float));
  }
  for (int64_t k = first; k < last; ++k, weight += PANEL) {
    for (int64_t i = 0; i < PANEL; i += CACHE_LINE / sizeof(W))
      __builtin_prefetch(weight + AHEAD * PANEL + i);
    Vector wide[VECTORS];
    for (int v = 0; v < VECTORS; ++v) wide[v] = widened(weight + v * LANES);
    for (int r = 0; r < R; ++r) {
      const float value = x[r * p.inputs + k];
      for (int v = 0; v < VECTORS; ++v) sums[r][v] = fma(wide[v], value, sums[r][v]);
    }
  }
  if (p.residual && last == p.inputs) {
    const float* before = p.residual + row * p.outputs + panel * PANEL;
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < VECTORS; ++v)
        if (const int64_t left = width - v * LANES; left > 0)
          sums[r][v] += load_some(before + r * p.outputs + v * LANES, left);
  }
  if (width == PANEL) {
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < VECTORS; ++v) store(out + r * p.outputs + v * LANES, sums[r][v]);
  } else {
    for (int r = 0; r < R; ++r)
      __builtin_memcpy(out + r * p.outputs, &sums[r][0], width * sizeof(float));
  }
}

template <typename W>
void add_part(const Product& p, int64_t panel, int64_t first, int64_t last, const W* weight) {
  int64_t row = 0;
  for (; row + ROWS <= p.rows; row += ROWS) add_rows<ROWS>(p, row, panel, first, last, weight);
  switch (p.rows - row) {
    case 5: add_rows<5>(p, row, panel, first, last, weight); break;
    case 4: add_rows<4>(p, row, panel, first, last, weight); break;
    case 3: add_rows<3>(p, row, panel, first, last, weight); break;
    case 2: add_rows<2>(p, row, panel, first, last, weight); break;
    case 1: add_rows<1>(p, row, panel, first, last, weight); break;
    default: break;
  }
}

template <typename W>
void add_panel(const Product& p, int64_t panel) {
  const W* weight = static_cast<const W*>(p.weight.data) + panel * p.inputs * PANEL;
  for (int64_t first = 0; first < p.inputs; first += DEPTH, weight += DEPTH * PANEL)
    add_part(p, panel, first, std::min(p.inputs, first + DEPTH), weight);
}

at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& weight, int64_t outputs) {
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && x.scalar_type() == at::kFloat);
  at::Tensor out = at::empty({x.size(0), outputs}, x.options());
  multiply({x.const_data_ptr<float>(), Weight::of(weight, x.size(1), outputs),
            out.data_ptr<float>(), x.size(0), x.size(1), outputs});
  return out;
}

}  // namespace

Weight Weight::of(const at::Tensor& packed, int64_t inputs, int64_t outputs) {
  TORCH_CHECK(packed.dim() == 3 && packed.is_contiguous() && packed.size(1) == inputs &&
              packed.size(2) == PANEL && packed.size(0) == (outputs + PANEL - 1) / PANEL);
  const at::ScalarType type = packed.scalar_type();
  TORCH_CHECK(type == at::kFloat || type == at::kBFloat16);
  return {packed.const_data_ptr(), type == at::kBFloat16};
}

void multiply(const Product& product) {
  const int64_t panels = (product.outputs + PANEL - 1) / PANEL;
  const int64_t work = PANEL * product.inputs * std::max<int64_t>(product.rows, 1);
  parallel(panels, (GRAIN + work - 1) / work, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel)
      product.weight.is_half ? add_panel<uint16_t>(product, panel)
                             : add_panel<float>(product, panel);
  });
}

}  // namespace draftline

TORCH_LIBRARY_FRAGMENT(draftline, library) {
  library.def("packed_linear(Tensor x, Tensor weight, int outputs) -> Tensor");
}

TORCH_LIBRARY_IMPL(draftline, CPU, library) {
  library.impl("packed_linear", &draftline::packed_linear);
}
