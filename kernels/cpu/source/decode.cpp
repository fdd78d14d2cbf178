// The operators that run a stage's layers: once, and for several tokens of each request in one step
// of a stage that holds the whole model. That is embedding, layers, head and choice, without Python
// between two passes. A pass reads all weights, so any other code between two passes runs with cold
// caches.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "attention.h"
#include "layers.h"
#include "linear.h"
#include "sampling.h"

namespace draftline {
namespace {

// Runs all layers on `states`, [rows, hidden size], which are overwritten; returns those after the
// last one. `to`, float32 [rows, (1 + stops) * hidden size], is filled with these and, behind them,
// those before each stop, a rising number of layers.
at::Tensor run_recording(const c10::intrusive_ptr<Layers>& layers, at::Tensor states,
                         at::TensorList rotations, at::IntArrayRef stops, float* to) {
  const int64_t rows = states.size(0), hidden = states.size(1), width = (1 + stops.size()) * hidden;
  const auto record = [&](int64_t column) {
    const float* from = states.const_data_ptr<float>();
    for (int64_t row = 0; row < rows; ++row)
      std::memcpy(to + row * width + column * hidden, from + row * hidden, hidden * sizeof(float));
  };
  int64_t first = 0;
  for (size_t i = 0; i < stops.size(); ++i) {
    states = layers->run(states, rotations, first, stops[i]);
    record(i + 1);
    first = stops[i];
  }
  states = layers->run(states, rotations, first, layers->size());
  record(0);
  return states;
}

// [rows, (1 + stops) * hidden size]: what `run_recording` records. In one call, as code between two
// layers runs with cold caches.
at::Tensor run_layers(const c10::intrusive_ptr<Layers>& layers, const at::Tensor& states,
                      at::TensorList rotations, at::IntArrayRef stops) {
  if (stops.empty()) return layers->run(states.clone(), rotations, 0, layers->size());
  const int64_t width = (1 + stops.size()) * states.size(1);
  at::Tensor out = at::empty({states.size(0), width}, states.options());
  run_recording(layers, states.clone(), rotations, stops, out.data_ptr<float>());
  return out;
}

// The modules after the layers.
struct Head {
  const at::Tensor& norm;
  at::TensorList weight;
  double eps;
  int64_t outputs;
  const std::optional<at::Tensor>& bias;
  std::optional<double> softcap;

  at::Tensor logits(const at::Tensor& hidden) const {
    const at::Tensor normed = rms_norm(hidden, norm, eps);
    at::Tensor out = at::empty({hidden.size(0), outputs}, hidden.options());
    multiply({normed.const_data_ptr<float>(), Weights::of(weight, hidden.size(1), outputs),
              out.data_ptr<float>(), hidden.size(0), hidden.size(1), outputs});
    // Added after the sums, as in a step of one token, for the same bits.
    if (bias) out.add_(*bias);
    return softcap ? soft_cap(out, *softcap) : out;
  }
};

// How the rows' tokens are chosen, each [rows]; temperature 0 is greedy.
struct Sampling {
  const at::Tensor &temperatures, &seeds, &positions;

  // Logits [rows, vocabulary] are overwritten; `ahead` is the number of the pass. Returns whether
  // all rows are finite: the best logit of other rows is NaN or infinite, and their token -1.
  bool choose(at::Tensor& logits, int64_t ahead, int32_t* tokens) const {
    const int64_t size = logits.size(1);
    bool finite = true;
    for (int64_t row = 0; row < logits.size(0); ++row) {
      float* own = logits.data_ptr<float>() + row * size;
      const float temperature = temperatures.const_data_ptr<float>()[row];
      const int64_t best = argmax(own, size);
      tokens[row] = std::isfinite(own[best]) ? best : -1;
      finite = finite && tokens[row] >= 0;
      if (temperature == 0 || tokens[row] < 0) continue;
      const float most = own[best];
      for (int64_t i = 0; i < size; ++i) own[i] = (own[i] - most) / temperature;
      tokens[row] = noisy_argmax(own, size, seeds.const_data_ptr<int64_t>()[row],
                                 positions.const_data_ptr<int64_t>()[row] + ahead);
    }
    return finite;
  }
};

void embed(const at::Tensor& table, const int32_t* tokens, at::Tensor& to) {
  const int64_t hidden = table.size(1);
  for (int64_t row = 0; row < to.size(0); ++row) {
    TORCH_CHECK(tokens[row] >= 0 && tokens[row] < table.size(0), "decode: no such token");
    std::memcpy(to.data_ptr<float>() + row * hidden,
                table.const_data_ptr<float>() + tokens[row] * hidden, hidden * sizeof(float));
  }
}

void check(const at::Tensor& tensor, at::ScalarType type, int64_t count) {
  TORCH_CHECK(tensor.is_contiguous() && tensor.scalar_type() == type && tensor.numel() == count,
              "decode: another shape");
}

// Whether the answers of rows have come to one of their ends, [rows, n].
struct Ends {
  const at::Tensor& ids;
  std::vector<bool> reached;

  explicit Ends(const at::Tensor& ids) : ids(ids), reached(ids.size(0)) {}

  // Whether all have, with these tokens.
  bool take(const int32_t* tokens) {
    const int64_t rows = ids.size(0), count = ids.size(1);
    bool all = true;
    for (int64_t row = 0; row < rows; ++row) {
      const int32_t* own = ids.const_data_ptr<int32_t>() + row * count;
      reached[row] = reached[row] || std::find(own, own + count, tokens[row]) != own + count;
      all = all && reached[row];
    }
    return all;
  }
};

// `slots` and `positions` [passes, rows] are those of the rows of each pass; the first are those of
// the thread's step. Returns int32 [passes, rows], with fewer passes once all answers have ended or
// logits are not finite. `recorded` [passes, rows, (1 + stops) * hidden], if it is wanted, is
// filled with the states that `run_recording` records in each pass.
at::Tensor decode(const c10::intrusive_ptr<Layers>& layers, const at::Tensor& first,
                  const at::Tensor& slots, const at::Tensor& positions, const at::Tensor& table,
                  const at::Tensor& norm, double eps, at::TensorList weight, int64_t outputs,
                  const std::optional<at::Tensor>& bias, std::optional<double> softcap,
                  const at::Tensor& temperatures, const at::Tensor& seeds,
                  const at::Tensor& sampled, const at::Tensor& end_ids, at::TensorList rotations,
                  at::IntArrayRef stops, const std::optional<at::Tensor>& recorded) {
  const int64_t passes = slots.size(0), rows = first.size(0), hidden = table.size(1);
  check(first, at::kInt, now.rows());
  check(slots, at::kInt, passes * rows), check(positions, at::kInt, passes * rows);
  check(temperatures, at::kFloat, rows);
  check(seeds, at::kLong, rows), check(sampled, at::kLong, rows);
  check(table, at::kFloat, table.size(0) * hidden), check(norm, at::kFloat, hidden);
  TORCH_CHECK(end_ids.dim() == 2 && end_ids.size(0) == rows);
  check(end_ids, at::kInt, end_ids.numel());
  if (bias) check(*bias, at::kFloat, outputs);
  const int64_t pass_size = rows * (1 + stops.size()) * hidden;
  if (recorded) check(*recorded, at::kFloat, passes * pass_size);
  const Head head{norm, weight, eps, outputs, bias, softcap};
  Ends ends(end_ids);
  const Sampling sampling{temperatures, seeds, sampled};
  at::Tensor out = at::empty({passes, rows}, first.options());
  at::Tensor states = at::empty({rows, hidden}, table.options());
  const int32_t* tokens = first.const_data_ptr<int32_t>();
  for (int64_t pass = 0; pass < passes; ++pass) {
    if (pass) advance_step(slots[pass], positions[pass]);
    embed(table, tokens, states);
    const at::Tensor last =
        recorded ? run_recording(layers, states, rotations, stops,
                                 recorded->data_ptr<float>() + pass * pass_size)
                 : layers->run(states, rotations, 0, layers->size());
    at::Tensor logits = head.logits(last);
    int32_t* chosen = out.data_ptr<int32_t>() + pass * rows;
    // Only the first pass of a step reports logits that are not finite.
    if (!sampling.choose(logits, pass, chosen)) return out.slice(0, 0, std::max<int64_t>(pass, 1));
    if (ends.take(chosen)) return out.slice(0, 0, pass + 1);
    tokens = chosen;
  }
  return out;
}

}  // namespace
}  // namespace draftline

TORCH_LIBRARY_FRAGMENT(draftline, library) {
  library.class_<draftline::Layers>("Layers")
      .def(torch::init<std::vector<at::Tensor>, std::vector<int64_t>, std::vector<double>, int64_t,
                       int64_t, int64_t>());
  library.def(
      "run_layers(__torch__.torch.classes.draftline.Layers layers, Tensor states, Tensor[] rotations,"
      " int[] stops) -> Tensor");
  library.def(
      "decode(__torch__.torch.classes.draftline.Layers layers, Tensor first, Tensor slots, Tensor "
      "positions, Tensor table, Tensor norm, float eps, Tensor[] weight, int outputs, Tensor? bias, "
      "float? softcap, Tensor temperatures, Tensor seeds, Tensor sampled, Tensor end_ids, Tensor[] "
      "rotations, int[] stops, Tensor(a!)? recorded=None) -> Tensor");
}

TORCH_LIBRARY_IMPL(draftline, CPU, library) {
  library.impl("run_layers", &draftline::run_layers);
  library.impl("decode", &draftline::decode);
}
