// The token of each row whose logit plus noise is largest, as in `core/sampling/choose.py`.
//
// For most tokens, a bound of the noise suffices. The exact noise is computed only if the bound
// exceeds the best sum so far.
#include "sampling.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "team.h"
#include "vectors.h"

namespace draftline {
namespace {

// The constants of `core/sampling/noise.py`; change both together.
constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15;
constexpr uint64_t MIX_1 = 0xBF58476D1CE4E5B9, MIX_2 = 0x94D049BB133111EB;
constexpr double LN2 = 0.693147180559945309417232121458;
// No noise is lower, and the best logit of a row is 0.
constexpr float LEAST_NOISE = -4.0f;
// Far above the rounding errors of logits, sums and exponentials in a score.
constexpr float MARGIN = 1e-3f;
// Tokens that are screened at once; multiplications of noise that are worth a thread.
constexpr int64_t BLOCK = 64, GRAIN = 1 << 14;

uint64_t mix64(uint64_t x) {
  x = (x ^ x >> 30) * MIX_1;
  x = (x ^ x >> 27) * MIX_2;
  return x ^ x >> 31;
}

double exact_log(double x) {
  const int64_t bits = std::bit_cast<int64_t>(x);
  const int64_t exponent = (bits - 0x3FE6A09E667F3BCD) >> 52;
  const double mantissa = std::bit_cast<double>(bits - (exponent << 52));
  const double s = (mantissa - 1.0) / (mantissa + 1.0), square = s * s;
  double series = 2.0 / 15;
  for (int power = 13; power > 0; power -= 2) series = series * square + 2.0 / power;
  return static_cast<double>(exponent) * LN2 + series * s;
}

float gumbel(uint64_t bits) {
  const double uniform = (static_cast<double>(bits >> 12) + 0.5) * 0x1p-52;
  return static_cast<float>(-exact_log(-exact_log(uniform)));
}

struct Choice {
  float score = -std::numeric_limits<float>::infinity();
  int64_t token = 0;
  // Tokens whose exp(-noise) is above this cannot beat a logit of 0.
  float reach = std::exp(MARGIN - LEAST_NOISE);

  void offer(float logit, int64_t candidate, uint64_t bits) {
    const float sum = logit + gumbel(bits);
    if (!(sum > score)) return;
    score = sum, token = candidate;
    reach = std::min(reach, std::exp(MARGIN - sum));
  }
};

// Noise is -log(-log(u)), and -log(u) is above 1 - u: a token whose 1 - u is not below
// exp(logit - best) falls behind the best. Of 1 - u the first 24 bits will do.
// `Ids`: the id of the token of a column.
template <typename Ids>
int64_t choose(const float* logits, int64_t size, uint64_t key, const Ids& ids) {
  Choice choice;
  for (int64_t first = 0; first < size; first += BLOCK) {
    const int64_t count = std::min(BLOCK, size - first);
    uint64_t bits[BLOCK];
    alignas(64) float rest[BLOCK], weights[BLOCK];
    for (int64_t i = 0; i < BLOCK; ++i) bits[i] = mix64(key + ids(first + i) * GAMMA);
    for (int64_t i = 0; i < BLOCK; ++i)
      rest[i] = static_cast<float>(static_cast<int32_t>(~bits[i] >> 40)) * 0x1p-24f;
    Ints found{};
    for (int64_t i = 0; i < count; i += LANES) {
      const Vector weight = exp_of(load_some(logits + first + i, count - i));
      store(weights + i, weight);
      found |= load(rest + i) < weight * choice.reach;
    }
    bool any = false;
    for (int64_t lane = 0; lane < LANES; ++lane) any |= found[lane] != 0;
    if (!any) continue;
    for (int64_t i = 0; i < count; ++i)
      if (rest[i] < weights[i] * choice.reach) choice.offer(logits[first + i], first + i, bits[i]);
  }
  return choice.token;
}

}  // namespace

int64_t argmax(const float* logits, int64_t size) {
  Vector most = all(HIDDEN);
  Ints numbers = ~Ints{};
  for (int64_t i = 0; i < size; i += LANES) {
    Vector part = all(HIDDEN);
    std::memcpy(&part, logits + i, std::min(LANES, size - i) * sizeof(float));
    most = part > most ? part : most;
    numbers &= part == part;
  }
  float best = HIDDEN;
  bool is_number = true;
  for (int64_t lane = 0; lane < LANES; ++lane)
    best = std::max(best, most[lane]), is_number &= numbers[lane] != 0;
  for (int64_t i = 0; i < size; ++i)
    if (is_number ? logits[i] == best : logits[i] != logits[i]) return i;
  return 0;
}

int64_t noisy_argmax(const float* scaled, int64_t size, int64_t seed, int64_t position,
                     const int64_t* ids) {
  const uint64_t by_seed = mix64(seed + GAMMA);
  const uint64_t key = mix64(by_seed ^ mix64(position * GAMMA + GAMMA));
  if (!ids) return choose(scaled, size, key, [](int64_t column) { return column; });
  return choose(scaled, size, key, [=](int64_t column) { return ids[std::min(column, size - 1)]; });
}

namespace {

at::Tensor noisy_argmax_rows(const at::Tensor& scaled, const at::Tensor& seeds,
                             const at::Tensor& positions,
                             const std::optional<at::Tensor>& token_ids) {
  const int64_t rows = scaled.size(0), size = scaled.size(1);
  TORCH_CHECK(scaled.is_contiguous() && scaled.scalar_type() == at::kFloat);
  TORCH_CHECK(seeds.is_contiguous() && positions.is_contiguous());
  TORCH_CHECK(seeds.numel() == rows && positions.numel() == rows);
  TORCH_CHECK(!token_ids || (token_ids->is_contiguous() && token_ids->numel() == size));
  at::Tensor out = at::empty({rows}, seeds.options());
  const float* logits = scaled.const_data_ptr<float>();
  const int64_t* seed = seeds.const_data_ptr<int64_t>();
  const int64_t* position = positions.const_data_ptr<int64_t>();
  const int64_t* ids = token_ids ? token_ids->const_data_ptr<int64_t>() : nullptr;
  int64_t* token = out.data_ptr<int64_t>();
  parallel(rows, std::max<int64_t>(GRAIN / std::max<int64_t>(size, 1), 1),
           [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      token[row] = noisy_argmax(logits + row * size, size, seed[row], position[row], ids);
  });
  return out;
}

}  // namespace
}  // namespace draftline

TORCH_LIBRARY_FRAGMENT(draftline, library) {
  library.def(
      "noisy_argmax(Tensor scaled, Tensor seeds, Tensor positions, Tensor? token_ids=None)"
      " -> Tensor");
}

TORCH_LIBRARY_IMPL(draftline, CPU, library) {
  library.impl("noisy_argmax", &draftline::noisy_argmax_rows);
}
