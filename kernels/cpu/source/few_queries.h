// A few queries: the head's dimension along the lanes.
#pragma once

#include "queries.h"

namespace draftline {

// Largest number of queries.
constexpr int64_t FEW = 4;

struct FewQueries : Queries {
  // Vectors of a head whose sums stay in registers.
  static constexpr int64_t SPAN = LANES == 16 ? 4 : 2;

  float* scaled(int64_t q) const { return state + q * call->head_dim; }
  float* sums(int64_t q) const { return scaled(count + q); }
  float* totals(int64_t q) const { return scaled(2 * count) + q * 2 * LANES; }
  float& largest(int64_t q) const { return totals(q)[LANES]; }

  void start() const {
    std::fill_n(state, state_size(*call, count), 0.0f);
    for (int64_t q = 0; q < count; ++q) {
      const float* from = query(q);
      for (int64_t d = 0; d < call->head_dim; ++d) scaled(q)[d] = call->scaling * from[d];
      largest(q) = HIDDEN;
    }
  }

  // Scores of LANES columns of one query, summed lane by lane and then by halves.
  Vector score_group(const float* query, const float* const* keys) const {
    Vector sums[LANES] = {};
    const int64_t whole = call->head_dim / LANES * LANES, rest = call->head_dim - whole;
    for (int64_t d = 0; d < whole; d += LANES) {
      const Vector part = load(query + d);
      for (int64_t i = 0; i < LANES; ++i) sums[i] = fma(part, load(keys[i] + d), sums[i]);
    }
    if (rest) {
      const Vector part = load_some(query + whole, rest);
      for (int64_t i = 0; i < LANES; ++i)
        sums[i] = fma(part, load_some(keys[i] + whole, rest), sums[i]);
    }
    return sums_of(sums);
  }

  void score(float* scores, int64_t first, int64_t last, int64_t width) const {
    for (int64_t c = first; c < last; c += LANES) {
      const float* keys[LANES];
      for (int64_t i = 0; i < LANES; ++i) keys[i] = key(std::min(c + i, last - 1));
      for (int64_t q = 0; q < count; ++q) {
        Vector value = score_group(scaled(q), keys);
        if (call->softcap) value = capped(value, *call->softcap);
        store(scores + q * width + c - first, value);
      }
    }
    for (int64_t q = 0; q < count; ++q)
      for (int64_t c = last; c < first + width; ++c) scores[q * width + c - first] = HIDDEN;
    hide_unseen(first, last,
                [&](int64_t q, int64_t c) { scores[q * width + c - first] = HIDDEN; });
  }

  // Turns scores of a query into weights; returns the factor of its earlier sums.
  float weigh(int64_t q, float* scores, int64_t first, int64_t last, int64_t width) const {
    Vector most = all(largest(q));
    for (int64_t c = 0; c < width; c += LANES) {
      const Vector value = load(scores + c);
      most = value > most ? value : most;
    }
    float top = HIDDEN;
    for (int64_t lane = 0; lane < LANES; ++lane) top = std::max(top, most[lane]);
    for (int64_t c = 0; c < width; c += LANES) {
      const Vector value = load(scores + c);
      store(scores + c, value > HIDDEN ? exp_of(value - top) : Vector{});
    }
    const Vector scale = rescaling(all(largest(q)), all(top));
    Vector total = load(totals(q)) * scale;
    const int64_t context = std::clamp(request->context, first, last) - first;
    int64_t c = 0;
    for (; c + LANES <= context; c += LANES) total += load(scores + c);
    total += load_some(scores + c, context - c);
    for (c = first + context; c < last; ++c) total[request->position(c) % LANES] += scores[c - first];
    store(totals(q), total);
    largest(q) = top;
    return scale[0];
  }

  // Adds the values of dimensions d, ..., d + span - 1.
  template <int Q, bool WHOLE>
  void mix_span(const float* weights, const float* scales, int64_t first, int64_t last,
                int64_t width, int64_t d, int64_t span) const {
    Vector added[Q][SPAN] = {};
    for (int64_t q = 0; q < Q; ++q)
      for (int64_t i = 0; i < SPAN; ++i)
        if (WHOLE || span > i * LANES)
          added[q][i] = load_some(sums(q) + d + i * LANES, span - i * LANES) * scales[q];
    for (int64_t c = first; c < last; ++c) {
      const float* v = value(c) + d;
      Vector parts[SPAN] = {};
      for (int64_t i = 0; i < SPAN; ++i) {
        if (WHOLE)
          parts[i] = load(v + i * LANES);
        else if (span > i * LANES)
          parts[i] = load_some(v + i * LANES, span - i * LANES);
      }
      for (int64_t q = 0; q < Q; ++q)
        for (int64_t i = 0; i < SPAN; ++i)
          added[q][i] = fma(parts[i], weights[q * width + c - first], added[q][i]);
    }
    for (int64_t q = 0; q < Q; ++q)
      for (int64_t i = 0; i < SPAN; ++i)
        if (WHOLE || span > i * LANES)
          store_some(sums(q) + d + i * LANES, added[q][i], span - i * LANES);
  }

  template <int Q>
  void mix(const float* weights, const float* scales, int64_t first, int64_t last,
           int64_t width) const {
    for (int64_t d = 0; d < call->head_dim; d += SPAN * LANES) {
      const int64_t span = std::min(SPAN * LANES, call->head_dim - d);
      if (span == SPAN * LANES)
        mix_span<Q, true>(weights, scales, first, last, width, d, span);
      else
        mix_span<Q, false>(weights, scales, first, last, width, d, span);
    }
  }

  // The columns of a tile; `room` for a score of each query and column.
  void take(int64_t first, int64_t last, float* room) const {
    const int64_t width = (last - first + LANES - 1) / LANES * LANES;
    score(room, first, last, width);
    float scales[FEW];
    for (int64_t q = 0; q < count; ++q) scales[q] = weigh(q, room + q * width, first, last, width);
    switch (count) {
      case 1: return mix<1>(room, scales, first, last, width);
      case 2: return mix<2>(room, scales, first, last, width);
      case 3: return mix<3>(room, scales, first, last, width);
      default: return mix<4>(room, scales, first, last, width);
    }
  }

  void finish() const {
    for (int64_t q = 0; q < count; ++q) {
      const float total = sum_of_lanes(load(totals(q)));
      for (int64_t d = 0; d < call->head_dim; ++d) out(q)[d] = sums(q)[d] / total;
    }
  }
};

}  // namespace draftline
