// The feed-forward block of a mixture: each row through the experts that its router has chosen.
//
// Rows are gathered by expert, so that a weight is read once for all its rows, and those of experts
// without rows are not read. A row's result is the sum of its experts' in the order of its choice.
// So it is bitwise independent of the other rows and of the number of threads.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <vector>

#include "linear.h"
#include "team.h"
#include "vectors.h"

namespace draftline {
namespace {

template <typename Number>
void move(const Number*& pointer, int64_t bytes) {
  if (pointer)
    pointer = reinterpret_cast<const Number*>(reinterpret_cast<const char*>(pointer) + bytes);
}

// Weights of all experts, each padded to whole panels: the panels of one behind those of another.
struct Stack {
  Weight first;
  std::array<int64_t, PARTS> bytes;  // of each tensor, from expert to expert

  Stack(at::TensorList parts, int64_t experts, int64_t inputs, int64_t outputs) {
    TORCH_CHECK(parts.size() == PARTS);
    std::array<at::Tensor, PARTS> whole;
    for (int64_t i = 0; i < PARTS; ++i) {
      whole[i] = parts[i];
      bytes[i] = whole[i].nbytes() / experts;
    }
    const auto& [codes, scales, zeros, groups, minima] = whole;
    if (groups.dim() == 2) {
      TORCH_CHECK(groups.is_contiguous() && groups.size(0) == experts);
      whole[3] = groups[0];
    } else {
      // All experts have the same groups.
      bytes[3] = 0;
    }
    const int64_t width = scales.dim() == 3 ? scales.size(2) : PANEL, panels = codes.size(0);
    TORCH_CHECK(panels == experts * ((outputs + width - 1) / width));
    first = Weight::of(whole, inputs, panels * width);
  }

  Weight of(int64_t expert) const {
    Weight weight = first;
    move(weight.codes, expert * bytes[0]);
    move(weight.scales, expert * bytes[1]);
    move(weight.zeros, expert * bytes[2]);
    move(weight.groups, expert * bytes[3]);
    move(weight.minima, expert * bytes[4]);
    return weight;
  }
};

// A matrix of all experts, whose outputs may lie in several stacks.
struct Matrix {
  std::vector<Stack> stacks;
  std::vector<int64_t> widths;
  const float* bias = nullptr;  // [experts, outputs]
  int64_t inputs, outputs = 0;

  Matrix(at::TensorList tensors, at::IntArrayRef each, const std::optional<at::Tensor>& added,
         int64_t experts, int64_t inputs)
      : widths(each.begin(), each.end()), inputs(inputs) {
    const int64_t count = widths.size();
    TORCH_CHECK(0 < count && count <= Weights::MOST && int64_t(tensors.size()) == count * PARTS);
    for (int64_t i = 0; i < count; ++i) {
      stacks.emplace_back(tensors.slice(i * PARTS, PARTS), experts, inputs, widths[i]);
      outputs += widths[i];
    }
    if (!added) return;
    TORCH_CHECK(added->is_contiguous() && added->scalar_type() == at::kFloat &&
                added->sizes() == at::IntArrayRef({experts, outputs}));
    bias = added->const_data_ptr<float>();
  }

  // Of an expert's rows `x` [rows, inputs].
  void multiply_by(int64_t expert, const float* x, int64_t rows, float* out) const {
    Weights weights;
    weights.count = stacks.size();
    for (int64_t i = 0; i < weights.count; ++i) {
      weights.parts[i] = stacks[i].of(expert);
      weights.outputs[i] = widths[i];
    }
    const float* own = bias ? bias + expert * outputs : nullptr;
    multiply({x, weights, out, rows, inputs, outputs, own});
  }
};

// What stands between the two products; the numbering of `kernels/cpu/experts.py`.
enum Activation : int64_t { SWISH = 0, GELU_TANH = 1, SQUARED_RELU = 2 };

struct Gate {
  int64_t activation;
  float alpha, limit, shift;

  Vector active(Vector x) const {
    if (activation == SQUARED_RELU) {
      const Vector above = x > 0.0f ? x : Vector{};
      return above * above;
    }
    // (1 + tanh(y)) / 2 is the sigmoid of 2 y.
    const Vector inner = activation == SWISH ? x * alpha
                                             : 1.5957691216057308f * fma(x * x * x, 0.044715f, x);
    return x / (exp_of(-inner) + 1.0f);
  }

  // activation(left) * (right + shift), with both within the limit.
  Vector operator()(Vector left, Vector right) const {
    left = left > limit ? all(limit) : left;
    right = right > limit ? all(limit) : right;
    right = right < -limit ? all(-limit) : right;
    return active(left) * (right + shift);
  }
};

// Parts of a loop over so many numbers a row.
int64_t rows_at_once(int64_t size) { return std::max<int64_t>((1 << 14) / size, 1); }

template <typename Work>
void each_row(int64_t rows, int64_t size, const Work& work) {
  parallel(rows, rows_at_once(size), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) work(row);
  });
}

// Where the rows of each expert lie once they are gathered.
struct Routes {
  std::vector<int64_t> starts;  // [experts + 1]
  std::vector<int64_t> rows;    // of the gathered ones: the row
  std::vector<int64_t> places;  // [rows, choices], gathered; -1: there is no such expert

  Routes(const int64_t* chosen, int64_t count, int64_t choices, int64_t experts)
      : starts(experts + 1), places(count * choices, -1) {
    const auto is_known = [&](int64_t expert) { return 0 <= expert && expert < experts; };
    for (int64_t i = 0; i < count * choices; ++i)
      if (is_known(chosen[i])) ++starts[chosen[i] + 1];
    for (int64_t expert = 0; expert < experts; ++expert) starts[expert + 1] += starts[expert];
    rows.resize(starts[experts]);
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    for (int64_t i = 0; i < count * choices; ++i) {
      if (!is_known(chosen[i])) continue;
      places[i] = next[chosen[i]]++;
      rows[places[i]] = i / choices;
    }
  }
};

at::Tensor run_experts(const at::Tensor& x, const at::Tensor& chosen, const at::Tensor& shares,
                       int64_t experts, at::TensorList up, at::IntArrayRef up_widths,
                       const std::optional<at::Tensor>& up_bias, at::TensorList down,
                       const std::optional<at::Tensor>& down_bias, int64_t activation,
                       double alpha, double limit, double shift) {
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && x.scalar_type() == at::kFloat);
  TORCH_CHECK(chosen.dim() == 2 && chosen.is_contiguous() && chosen.scalar_type() == at::kLong &&
              chosen.size(0) == x.size(0));
  TORCH_CHECK(shares.is_contiguous() && shares.scalar_type() == at::kFloat &&
              shares.sizes() == chosen.sizes());
  TORCH_CHECK(experts > 0);
  const int64_t count = x.size(0), hidden = x.size(1), choices = chosen.size(1);
  const Matrix first(up, up_widths, up_bias, experts, hidden);
  const bool is_gated = activation != SQUARED_RELU;
  const int64_t width = is_gated ? first.outputs / 2 : first.outputs;
  TORCH_CHECK(first.outputs == (is_gated ? 2 * width : width));
  const Matrix second(down, hidden, down_bias, experts, width);
  const Gate gate{activation, float(alpha), float(limit), float(shift)};

  const Routes routes(chosen.const_data_ptr<int64_t>(), count, choices, experts);
  const int64_t gathered = routes.rows.size();
  const auto buffer = [&](int64_t size) { return at::empty({gathered, size}, x.options()); };
  const at::Tensor inputs = buffer(hidden), between = buffer(first.outputs), active = buffer(width);
  const float* from = x.const_data_ptr<float>();
  float* own = inputs.data_ptr<float>();
  each_row(gathered, hidden, [&](int64_t row) {
    std::copy_n(from + routes.rows[row] * hidden, hidden, own + row * hidden);
  });

  const auto by_expert = [&](const Matrix& matrix, const float* rows, float* out) {
    for (int64_t expert = 0; expert < experts; ++expert) {
      const int64_t begin = routes.starts[expert], end = routes.starts[expert + 1];
      if (begin < end)
        matrix.multiply_by(expert, rows + begin * matrix.inputs, end - begin,
                           out + begin * matrix.outputs);
    }
  };
  float* gates = between.data_ptr<float>();
  float* gated = active.data_ptr<float>();
  by_expert(first, own, gates);
  each_row(gathered, first.outputs, [&](int64_t row) {
    const float* left = gates + row * first.outputs;
    for (int64_t i = 0; i < width; i += LANES) {
      const Vector part = load_some(left + i, width - i);
      store_some(gated + row * width + i,
                 is_gated ? gate(part, load_some(left + width + i, width - i)) : gate.active(part),
                 width - i);
    }
  });
  // The rows that were gathered are not needed any more.
  by_expert(second, gated, own);

  at::Tensor out = at::empty({count, hidden}, x.options());
  float* to = out.data_ptr<float>();
  const float* share = shares.const_data_ptr<float>();
  each_row(count, hidden * choices, [&](int64_t row) {
    for (int64_t i = 0; i < hidden; i += LANES) {
      Vector sum{};
      for (int64_t k = row * choices; k < (row + 1) * choices; ++k)
        if (routes.places[k] >= 0)
          sum = fma(load_some(own + routes.places[k] * hidden + i, hidden - i), share[k], sum);
      store_some(to + row * hidden + i, sum, hidden - i);
    }
  });
  return out;
}

}  // namespace
}  // namespace draftline

TORCH_LIBRARY_FRAGMENT(draftline, library) {
  library.def(
      "run_experts(Tensor x, Tensor chosen, Tensor shares, int experts, Tensor[] up, "
      "int[] up_widths, Tensor? up_bias, Tensor[] down, Tensor? down_bias, int activation, "
      "float alpha, float limit, float shift) -> Tensor");
}

TORCH_LIBRARY_IMPL(draftline, CPU, library) {
  library.impl("run_experts", &draftline::run_experts);
}
