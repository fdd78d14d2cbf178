// A product with a matrix that lies in panels of PANEL columns, [panels, inputs, PANEL], the last
// one padded with zeros. Weights of 4, 8 and 16 bits are widened in registers, so that their sums are
// those of the same weights in 32 bits, with fewer bytes to read. Integers of 4 and 8 bits have
// another form on processors with dot products of bytes (`byte_dots.cpp`).
//
// A row's sums run over the inputs in order, with one rounding each, for any number of rows and
// threads. So a row's result is bitwise independent of the other rows. Few rows are bound by
// reading the weight once; for many, a part of a panel stays in the cache while they pass.
#include "linear.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <tuple>
#include <vector>

#include "byte_dots.h"
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

// Least number of chunks of rows that a thread splits into digits.
constexpr int64_t SPLIT_GRAIN = 512;

constexpr int64_t CACHE_LINE = 64;

constexpr bool has_zeros(Kind kind) { return kind == Kind::UINT8 || kind == Kind::UINT4; }

constexpr bool has_minima(Kind kind) {
  return kind == Kind::UINT4_MINIMA || kind == Kind::INT8_MINIMA;
}

constexpr bool is_quantized(Kind kind) { return kind > Kind::BFLOAT16; }

constexpr bool has_dots(Kind kind) { return kind >= Kind::DOT8; }

constexpr int64_t panel_of(Kind kind) { return has_dots(kind) ? DOT_COLUMNS : PANEL; }

// Bytes of PANEL numbers, or of a chunk of a panel.
constexpr int64_t row_bytes(Kind kind) {
  switch (kind) {
    case Kind::DOT8:
    case Kind::DOT4:
    case Kind::DOT_E2M1: return chunk_bytes(kind);
    case Kind::FLOAT32: return PANEL * 4;
    case Kind::BFLOAT16: return PANEL * 2;
    case Kind::E2M1:
    case Kind::UINT4:
    case Kind::UINT4_MINIMA: return PANEL / 2;
    default: return PANEL;
  }
}

// The weights of a panel from an input on.
template <Kind K>
struct Panel {
  const uint8_t* codes;
  const float* scales = nullptr;
  const uint8_t* powers = nullptr;  // e8m0, in place of scales
  const uint8_t* zeros = nullptr;
  const float* minima = nullptr;
  const int32_t* groups = nullptr;
  // Those of the last input.
  int32_t group = -1;
  Vector scale[VECTORS], minimum[VECTORS];
  Ints zero[VECTORS];

  Panel(const Weight& weight, int64_t inputs, int64_t panel, int64_t first)
      : codes(weight.codes + (panel * inputs + first) * row_bytes(K)) {
    if constexpr (is_quantized(K)) {
      const int64_t offset = panel * weight.num_groups * PANEL;
      if (weight.scale_type == Scales::E8M0)
        powers = static_cast<const uint8_t*>(weight.scales) + offset;
      else
        scales = static_cast<const float*>(weight.scales) + offset;
      groups = weight.groups + first;
    }
    if constexpr (has_zeros(K)) zeros = weight.zeros + panel * weight.num_groups * PANEL;
    if constexpr (has_minima(K))
      minima = static_cast<const float*>(weight.minima) + panel * weight.num_groups * PANEL;
  }

  // Those of input k from there on, in float32. Always inline, so that a group stays in registers.
  [[gnu::always_inline]] void widen(int64_t k, Vector* wide) {
    const uint8_t* row = codes + k * row_bytes(K);
    for (int64_t i = 0; i < row_bytes(K); i += CACHE_LINE)
      __builtin_prefetch(row + AHEAD * row_bytes(K) + i);
    if constexpr (is_quantized(K)) {
      if (groups[k] != group) take_group(groups[k]);
    }
    for (int v = 0; v < VECTORS; ++v) {
      const uint8_t* part = row + v * row_bytes(K) / VECTORS;
      if constexpr (K == Kind::FLOAT32) {
        wide[v] = load(reinterpret_cast<const float*>(part));
      } else if constexpr (K == Kind::BFLOAT16) {
        wide[v] = load_half(part);
      } else if constexpr (K == Kind::E4M3) {
        // Sign, exponent and fraction in their places; the scale makes up for the exponent's bias.
        const Ints bits = load_signed_bytes(part) << 20 & int32_t(0x87f00000);
        wide[v] = (Vector)bits * scale[v];
      } else if constexpr (K == Kind::E2M1) {
        wide[v] = e2m1_of(half_bytes(row, v)) * scale[v];
      } else {
        const Vector code = __builtin_convertvector(steps(row, v), Vector);
        // The same as two roundings, since the products with scales of minima are exact.
        wide[v] = has_minima(K) ? fma(code, scale[v], minimum[v]) : code * scale[v];
      }
    }
  }

  // Of the integer kinds: codes less their zero points. A difference of bytes is exact in float32.
  Ints steps(const uint8_t* row, int v) const {
    if constexpr (K == Kind::INT8 || K == Kind::INT8_MINIMA)
      return load_signed_bytes(row + v * LANES);
    if constexpr (K == Kind::UINT8) return load_bytes(row + v * LANES) - zero[v];
    if constexpr (has_minima(K)) return half_bytes(row, v);
    return half_bytes(row, v) - zero[v];
  }

  // Codes of 4 bits.
  static Ints half_bytes(const uint8_t* row, int v) {
    constexpr int HALF = VECTORS / 2;
    const Ints both = load_bytes(row + v % HALF * LANES);
    return v < HALF ? both & 15 : both >> 4;
  }

  void take_group(int32_t next) {
    group = next;
    for (int v = 0; v < VECTORS; ++v) {
      const int64_t lane = next * PANEL + v * LANES;
      scale[v] = powers ? load_powers(powers + lane) : load(scales + lane);
      if constexpr (has_zeros(K)) zero[v] = load_bytes(zeros + next * PANEL + v * LANES);
      if constexpr (has_minima(K)) minimum[v] = load(minima + next * PANEL + v * LANES);
    }
  }
};

// Adds the products with the inputs from `first` to before `last`, whose weights `weights` begins
// with.
template <int R, Kind K>
void add_rows(const Part& p, int64_t row, int64_t panel, int64_t first, int64_t last,
              Panel<K> weights) {
  const float* x = p.x + row * p.inputs + first;
  float* out = p.out + row * p.stride + panel * PANEL;
  const int64_t width = std::min(PANEL, p.outputs - panel * PANEL);
  Vector sums[R][VECTORS] = {};
  if (first > 0) {
    for (int r = 0; r < R; ++r)
      __builtin_memcpy(&sums[r][0], out + r * p.stride, width * sizeof(float));
  } else if (p.bias) {
    for (int r = 0; r < R; ++r)
      __builtin_memcpy(&sums[r][0], p.bias + panel * PANEL, width * sizeof(float));
  }
  for (int64_t k = 0; k < last - first; ++k) {
    Vector wide[VECTORS];
    weights.widen(k, wide);
    for (int r = 0; r < R; ++r) {
      const float value = x[r * p.inputs + k];
      for (int v = 0; v < VECTORS; ++v) sums[r][v] = fma(wide[v], value, sums[r][v]);
    }
  }
  if (p.residual && last == p.inputs) {
    const float* before = p.residual + row * p.stride + panel * PANEL;
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < VECTORS; ++v)
        if (const int64_t left = width - v * LANES; left > 0)
          sums[r][v] += load_some(before + r * p.stride + v * LANES, left);
  }
  if (width == PANEL) {
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < VECTORS; ++v) store(out + r * p.stride + v * LANES, sums[r][v]);
  } else {
    for (int r = 0; r < R; ++r)
      __builtin_memcpy(out + r * p.stride, &sums[r][0], width * sizeof(float));
  }
}

template <Kind K>
void add_part(const Part& p, int64_t panel, int64_t first, int64_t last,
              const Panel<K>& weights) {
  int64_t row = 0;
  for (; row + ROWS <= p.rows; row += ROWS) add_rows<ROWS>(p, row, panel, first, last, weights);
  switch (p.rows - row) {
    case 5: add_rows<5>(p, row, panel, first, last, weights); break;
    case 4: add_rows<4>(p, row, panel, first, last, weights); break;
    case 3: add_rows<3>(p, row, panel, first, last, weights); break;
    case 2: add_rows<2>(p, row, panel, first, last, weights); break;
    case 1: add_rows<1>(p, row, panel, first, last, weights); break;
    default: break;
  }
}

template <Kind K>
void add_panel(const Part& p, int64_t panel) {
  for (int64_t first = 0; first < p.inputs; first += DEPTH) {
    const int64_t last = std::min(p.inputs, first + DEPTH);
    add_part(p, panel, first, last, Panel<K>(p.weight, p.inputs, panel, first));
  }
}

// `add_panel` of the weight's kind.
void add_panel_of(const Part& p, int64_t panel) {
  switch (p.weight.kind) {
    case Kind::FLOAT32: return add_panel<Kind::FLOAT32>(p, panel);
    case Kind::BFLOAT16: return add_panel<Kind::BFLOAT16>(p, panel);
    case Kind::INT8: return add_panel<Kind::INT8>(p, panel);
    case Kind::INT8_MINIMA: return add_panel<Kind::INT8_MINIMA>(p, panel);
    case Kind::E4M3: return add_panel<Kind::E4M3>(p, panel);
    case Kind::E2M1: return add_panel<Kind::E2M1>(p, panel);
    case Kind::UINT8: return add_panel<Kind::UINT8>(p, panel);
    case Kind::UINT4: return add_panel<Kind::UINT4>(p, panel);
    case Kind::UINT4_MINIMA: return add_panel<Kind::UINT4_MINIMA>(p, panel);
    case Kind::DOT8:
    case Kind::DOT4:
    case Kind::DOT_E2M1: return multiply_panel(p, panel);
  }
}

Kind kind_of(const at::Tensor& codes, const at::Tensor& minima) {
  if (codes.dim() == 4) {
    if (codes.scalar_type() == at::kFloat4_e2m1fn_x2) return Kind::DOT_E2M1;
    return codes.size(3) == DOT_COLUMNS * 4 ? Kind::DOT8 : Kind::DOT4;
  }
  switch (codes.scalar_type()) {
    case at::kFloat: return Kind::FLOAT32;
    case at::kBFloat16: return Kind::BFLOAT16;
    case at::kChar: return minima.numel() ? Kind::INT8_MINIMA : Kind::INT8;
    case at::kFloat8_e4m3fn: return Kind::E4M3;
    case at::kFloat4_e2m1fn_x2: return Kind::E2M1;
    case at::kByte:
      if (codes.size(2) == PANEL) return Kind::UINT8;
      return minima.numel() ? Kind::UINT4_MINIMA : Kind::UINT4;
    default: TORCH_CHECK(false, "a packed weight of another type");
  }
}

at::Tensor packed_linear(const at::Tensor& x, at::TensorList weight, int64_t outputs,
                         const std::optional<at::Tensor>& bias, bool is_rough) {
  TORCH_CHECK(x.dim() && x.scalar_type() == at::kFloat);
  TORCH_CHECK(!bias || (bias->is_contiguous() && bias->scalar_type() == at::kFloat &&
                        bias->numel() == outputs));
  const at::Tensor rows = x.contiguous();
  const int64_t inputs = x.size(-1);
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = outputs;
  at::Tensor out = at::empty(shape, x.options());
  multiply({rows.const_data_ptr<float>(), Weights::of(weight, inputs, outputs),
            out.data_ptr<float>(), out.numel() / outputs, inputs, outputs,
            bias ? bias->const_data_ptr<float>() : nullptr, nullptr, is_rough});
  return out;
}

}  // namespace

Weight Weight::of(at::TensorList parts, int64_t inputs, int64_t outputs) {
  TORCH_CHECK(parts.size() == PARTS);
  const auto& [codes, scales, zeros, groups, minima] =
      std::tie(parts[0], parts[1], parts[2], parts[3], parts[4]);
  TORCH_CHECK((codes.dim() == 3 || codes.dim() == 4) && codes.is_contiguous());
  const Kind kind = kind_of(codes, minima);
  const int64_t panel = panel_of(kind), panels = (outputs + panel - 1) / panel;
  // What lies one behind the other in a panel.
  const int64_t length = has_dots(kind) ? chunks_of(inputs) : inputs;
  TORCH_CHECK(codes.size(0) == panels && codes.size(1) == length &&
              int64_t(codes.nbytes()) == panels * length * row_bytes(kind));
  Weight weight{kind, static_cast<const uint8_t*>(codes.const_data_ptr())};
  if (!draftline::is_quantized(kind)) return weight;
  TORCH_CHECK(scales.dim() == 3 && scales.is_contiguous() && scales.size(0) == panels &&
              scales.size(2) == panel && groups.is_contiguous() && groups.numel() == length);
  weight.scales = scales.const_data_ptr();
  weight.groups = groups.const_data_ptr<int32_t>();
  weight.num_groups = scales.size(1);
  switch (scales.scalar_type()) {
    case at::kFloat: break;
    case at::kFloat8_e8m0fnu: weight.scale_type = Scales::E8M0; break;
    default:
      TORCH_CHECK(has_dots(kind) && scales.scalar_type() == at::kHalf);
      weight.scale_type = Scales::FLOAT16;
  }
  if (has_zeros(kind) || (has_dots(kind) && zeros.numel())) {
    TORCH_CHECK(zeros.is_contiguous() && zeros.sizes() == scales.sizes());
    weight.zeros = zeros.const_data_ptr<uint8_t>();
  }
  if (has_minima(kind) || (has_dots(kind) && minima.numel())) {
    TORCH_CHECK(minima.is_contiguous() && minima.sizes() == scales.sizes() &&
                minima.scalar_type() == scales.scalar_type());
    weight.minima = minima.const_data_ptr();
  }
  return weight;
}

Weights Weights::of(at::TensorList tensors, int64_t inputs, at::IntArrayRef outputs) {
  const int64_t most = outputs.size();
  TORCH_CHECK(most <= MOST && int64_t(tensors.size()) == most * PARTS);
  Weights weights;
  const bool apart = most > 1 && tensors[PARTS].numel();
  weights.count = apart ? most : 1;
  for (int64_t i = 0; i < weights.count; ++i) {
    weights.outputs[i] =
        apart ? outputs[i] : std::accumulate(outputs.begin(), outputs.end(), int64_t{0});
    weights.parts[i] = Weight::of(tensors.slice(i * PARTS, PARTS), inputs, weights.outputs[i]);
  }
  return weights;
}

void multiply(const Product& product) {
  const Weights& weights = product.weights;
  const int64_t rows = product.rows, chunks = chunks_of(product.inputs);
  std::unique_ptr<Digits[]> digits;
  if (std::any_of(weights.parts, weights.parts + weights.count,
                  [](const Weight& weight) { return has_dots(weight.kind); })) {
    digits = std::make_unique_for_overwrite<Digits[]>(rows * chunks);
    parallel(chunks, SPLIT_GRAIN / std::max<int64_t>(rows, 1) + 1, [&](int64_t begin, int64_t end) {
      split_inputs(product.x, rows, product.inputs, begin, end, product.is_rough, digits.get());
    });
  }
  Part parts[Weights::MOST];
  // Of each part, the first panel among those of all.
  int64_t starts[Weights::MOST + 1] = {}, first = 0;
  for (int64_t i = 0; i < weights.count; ++i) {
    const int64_t outputs = weights.outputs[i], panel = panel_of(weights.parts[i].kind);
    const auto from = [&](const float* all) { return all ? all + first : nullptr; };
    parts[i] = {product.x, digits.get(), weights.parts[i], product.out + first, rows,
                product.inputs, outputs, product.outputs, from(product.bias),
                from(product.residual), product.is_rough};
    starts[i + 1] = starts[i] + (outputs + panel - 1) / panel;
    first += outputs;
  }
  const int64_t work = PANEL * product.inputs * std::max<int64_t>(rows, 1);
  const int64_t panels = starts[weights.count];
  parallel(panels, (GRAIN + work - 1) / work, [&](int64_t begin, int64_t end) {
    int64_t part = 0;
    for (int64_t panel = begin; panel < end; ++panel) {
      while (panel >= starts[part + 1]) ++part;
      add_panel_of(parts[part], panel - starts[part]);
    }
  });
}

}  // namespace draftline

TORCH_LIBRARY_FRAGMENT(draftline, library) {
  library.def(
      "packed_linear(Tensor x, Tensor[] weight, int outputs, Tensor? bias=None, "
      "bool is_rough=False) -> Tensor");
}

TORCH_LIBRARY_IMPL(draftline, CPU, library) {
  library.impl("packed_linear", &draftline::packed_linear);
}
