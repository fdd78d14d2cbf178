// Many queries: one a lane.
#pragma once

#include "few_queries.h"

namespace draftline {

// Least number of queries: from here on one vector of queries is faster than two times a few.
constexpr int64_t MANY = std::min(FEW, LANES / 2) + 1;

struct ManyQueries : Queries {
  static constexpr int64_t QUARTER = LANES / 4;
  // Values of a head whose sums stay in registers.
  static constexpr int64_t CHUNK = LANES == 16 ? 16 : 8;
  // Columns whose scores are summed at once.
  static constexpr int64_t ABREAST = LANES == 16 ? 4 : 2;

  Vector* scaled() const { return reinterpret_cast<Vector*>(state); }
  Vector* sums() const { return scaled() + call->head_dim; }
  Vector* totals() const { return sums() + call->head_dim; }
  Vector& largest() const { return totals()[LANES]; }

  void start() const {
    std::fill_n(state, state_size(*call, LANES), 0.0f);
    for (int64_t lane = 0; lane < LANES; ++lane) {
      const float* from = query(std::min(lane, count - 1));
      for (int64_t d = 0; d < call->head_dim; ++d) scaled()[d][lane] = call->scaling * from[d];
    }
    largest() = all(HIDDEN);
  }

  // Scores of N columns, in the order of `FewQueries::score_group`: dimensions d, d + LANES, ...
  // have a sum of their own, and four of these sums, a quarter of the lanes apart, are taken at
  // once.
  template <int64_t N, bool WHOLE>
  void score_columns(int64_t column, Vector* to) const {
    const Vector* query = scaled();
    const float* keys[N];
    for (int64_t n = 0; n < N; ++n) keys[n] = key(column + n);
    Vector quarters[N][QUARTER];
    for (int64_t j = 0; j < QUARTER; ++j) {
      Vector sums[N][4] = {};
      for (int64_t d = j; d < call->head_dim; d += LANES)
        for (int64_t part = 0; part < 4; ++part)
          if (const int64_t at = d + part * QUARTER; WHOLE || at < call->head_dim)
            for (int64_t n = 0; n < N; ++n)
              sums[n][part] = fma(query[at], keys[n][at], sums[n][part]);
      for (int64_t n = 0; n < N; ++n)
        quarters[n][j] = (sums[n][0] + sums[n][2]) + (sums[n][1] + sums[n][3]);
    }
    for (int64_t n = 0; n < N; ++n) {
      for (int64_t half = QUARTER / 2; half > 0; half /= 2)
        for (int64_t j = 0; j < half; ++j) quarters[n][j] += quarters[n][j + half];
      to[n] = quarters[n][0];
    }
  }

  template <bool WHOLE>
  void score_all(Vector* scores, int64_t first, int64_t last) const {
    int64_t c = first;
    for (; c + ABREAST <= last; c += ABREAST)
      score_columns<ABREAST, WHOLE>(c, scores + c - first);
    for (; c < last; ++c) score_columns<1, WHOLE>(c, scores + c - first);
  }

  void score(Vector* scores, int64_t first, int64_t last) const {
    if (call->head_dim % LANES)
      score_all<false>(scores, first, last);
    else
      score_all<true>(scores, first, last);
    if (call->softcap)
      for (int64_t c = 0; c < last - first; ++c) scores[c] = capped(scores[c], *call->softcap);
    hide_unseen(first, last,
                [&](int64_t q, int64_t column) { scores[column - first][q] = HIDDEN; });
  }

  // Turns scores into weights; returns the factors of earlier sums.
  Vector weigh(Vector* scores, int64_t first, int64_t last) const {
    Vector top = largest();
    for (int64_t c = 0; c < last - first; ++c) top = scores[c] > top ? scores[c] : top;
    const Vector scale = rescaling(largest(), top);
    for (int64_t lane = 0; lane < LANES; ++lane) totals()[lane] *= scale;
    for (int64_t c = first; c < last; ++c) {
      Vector& value = scores[c - first];
      value = value > HIDDEN ? exp_of(value - top) : Vector{};
      totals()[request->position(c) % LANES] += value;
    }
    largest() = top;
    return scale;
  }

  // Adds the values of dimensions d, ..., d + width - 1; all CHUNK where WHOLE.
  template <bool WHOLE>
  void mix_chunk(const Vector* weights, Vector scale, int64_t first, int64_t last, int64_t d,
                 int64_t width) const {
    Vector added[CHUNK] = {};
    for (int64_t i = 0; i < CHUNK; ++i)
      if (WHOLE || i < width) added[i] = sums()[d + i] * scale;
    for (int64_t c = first; c < last; ++c) {
      const float* v = value(c) + d;
      const Vector weight = weights[c - first];
      for (int64_t i = 0; i < CHUNK; ++i)
        if (WHOLE || i < width) added[i] = fma(weight, v[i], added[i]);
    }
    for (int64_t i = 0; i < CHUNK; ++i)
      if (WHOLE || i < width) sums()[d + i] = added[i];
  }

  void mix(const Vector* weights, Vector scale, int64_t first, int64_t last) const {
    for (int64_t d = 0; d < call->head_dim; d += CHUNK) {
      const int64_t width = std::min(CHUNK, call->head_dim - d);
      if (width == CHUNK)
        mix_chunk<true>(weights, scale, first, last, d, width);
      else
        mix_chunk<false>(weights, scale, first, last, d, width);
    }
  }

  // The columns of a tile; `room` for a vector of scores of each column.
  void take(int64_t first, int64_t last, float* room) const {
    Vector* scores = reinterpret_cast<Vector*>(room);
    score(scores, first, last);
    mix(scores, weigh(scores, first, last), first, last);
  }

  void finish() const {
    const Vector total = sum_in_halves(totals());
    for (int64_t d = 0; d < call->head_dim; ++d) {
      const Vector value = sums()[d] / total;
      for (int64_t lane = 0; lane < count; ++lane) out(lane)[d] = value[lane];
    }
  }
};

}  // namespace draftline
