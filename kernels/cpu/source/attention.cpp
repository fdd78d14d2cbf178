// A step's attention over a paged KV cache, with the trees' masks.
//
// Queries of one request that share a key/value head are computed together, in one of two ways: a
// few with the head's dimension along the lanes, many with one query a lane. Both add in the same
// order, so a row's result depends, bit by bit, on what the row sees alone: not on how many rows
// are beside it, on columns that it does not see, or on threads.
//
// The order: a score sums the products of each lane's dimensions (d, d + LANES, ...), then the
// lanes by halves; a weight's total sums those of positions p, p + LANES, ..., then these by
// halves; values are added in the order of the columns, which ascends by position on a path.
#include "attention.h"

#include <algorithm>
#include <atomic>

#include "team.h"
#include "vectors.h"

namespace draftline {

namespace {

// Queries that are computed with the dimension along the lanes, at once.
constexpr int64_t FEW = 4;
// At least so many queries are computed one a lane.
constexpr int64_t MANY = LANES / 2 + 1;
// Columns that are fetched at once; floats of a cache line.
constexpr int64_t AHEAD = 64, LINE = 16;
// Vectors of a head whose sums stay in registers, for FEW queries.
constexpr int64_t SPAN = LANES == 16 ? 4 : 2;
// Values of a head whose sums stay in registers, one query a lane.
constexpr int64_t CHUNK = LANES == 16 ? 16 : 8;
// Columns whose scores are summed at once, one query a lane.
constexpr int64_t ABREAST = LANES == 16 ? 4 : 2;

// Room for `count` values, the thread's own, until its next call.
template <typename T>
T* scratch(int64_t count) {
  static thread_local std::vector<T> values;
  if (static_cast<int64_t>(values.size()) < count) values.resize(count);
  return values.data();
}

int64_t aligned(int64_t column) { return column / LANES * LANES; }

// Some queries of one request and one key/value head.
struct Block {
  const Call* call;
  const Request* request;
  int64_t kv_head, begin, count;

  int64_t row(int64_t query) const { return (begin + query) / call->share(); }

  int64_t head(int64_t query) const {
    return kv_head * call->share() + (begin + query) % call->share();
  }

  const float* query(int64_t q) const {
    return call->heads +
        ((request->first + row(q)) * call->all_heads + head(q)) * call->head_dim;
  }

  float* out(int64_t q) const {
    return call->out + ((request->first + row(q)) * call->num_heads + head(q)) * call->head_dim;
  }

  const float* key(int64_t column) const {
    const int64_t pair = int64_t{request->slots[column]} * 2;
    return call->kv + (pair * call->kv_heads + kv_head) * call->head_dim;
  }

  const float* value(int64_t column) const {
    return key(column) + call->kv_heads * call->head_dim;
  }

  int64_t position(int64_t query) const { return call->positions[request->first + row(query)]; }

  // The first column of the context that a query sees.
  int64_t first_seen(int64_t query) const {
    if (!call->window) return 0;
    return std::clamp<int64_t>(position(query) - *call->window + 1, 0, request->context);
  }

  // The last multiple of LANES that is before all columns that any query sees, or the first.
  int64_t first_column() const {
    int64_t lowest = request->context;
    for (int64_t q = 0; q < count; ++q) lowest = std::min(lowest, first_seen(q));
    return aligned(lowest);
  }

  // Columns behind the last one that any query sees.
  int64_t last_column() const {
    const int64_t all = request->columns();
    return request->mask ? all : std::min(all, request->context + row(count - 1) + 1);
  }

  // Calls hide(query, column) for each column from `first` on that a query does not see.
  template <typename Hide>
  void hide_unseen(int64_t first, int64_t last, Hide hide) const {
    const int64_t context = request->context, owns = request->owns();
    for (int64_t q = 0; q < count; ++q) {
      const int64_t seen = first_seen(q), own_row = row(q);
      for (int64_t c = first; c < seen; ++c) hide(q, c);
      if (request->mask) {
        const uint8_t* visible = request->mask + own_row * owns;
        for (int64_t own = 0; own < last - context; ++own)
          if (!visible[own]) hide(q, context + own);
      } else {
        for (int64_t c = context + own_row + 1; c < last; ++c) hide(q, c);
      }
      if (!call->window) continue;
      const int64_t lowest = position(q) - *call->window;
      for (int64_t own = 0; own < last - context; ++own)
        if (request->own_positions[own] <= lowest) hide(q, context + own);
    }
  }
};

// The dimension along the lanes.
struct FewQueries : Block {
  // Scores of LANES columns of one query, summed lane by lane and then by halves.
  Vector score_group(const float* query, const float* const* keys) const {
    Vector sums[LANES] = {};
    const int64_t whole = aligned(call->head_dim), rest = call->head_dim - whole;
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

  // Reads a slot in the order of its addresses, with the heads that come next: a processor fetches
  // ahead where it sees a stream, which the keys of one head, some lines of a slot each, are not.
  void touch(int64_t column) const {
    const volatile float* pair = key(column);
    for (int64_t d = 0; d < 2 * call->kv_heads * call->head_dim; d += LINE) (void)pair[d];
  }

  void score(float* queries, float* scores, int64_t first, int64_t last, int64_t width) const {
    const int64_t dim = call->head_dim;
    for (int64_t q = 0; q < count; ++q) {
      const float* from = query(q);
      for (int64_t d = 0; d < dim; ++d) queries[q * dim + d] = call->scaling * from[d];
    }
    for (int64_t c = first; c < last; c += LANES) {
      const float* keys[LANES];
      for (int64_t i = 0; i < LANES; ++i) keys[i] = key(std::min(c + i, last - 1));
      if (kv_head == 0 && (c - first) % AHEAD == 0)
        for (int64_t i = c; i < std::min(c + AHEAD, last); ++i) touch(i);
      for (int64_t q = 0; q < count; ++q) {
        Vector value = score_group(queries + q * dim, keys);
        if (call->softcap) value = capped(value, *call->softcap);
        store(scores + q * width + c - first, value);
      }
    }
    for (int64_t q = 0; q < count; ++q)
      for (int64_t c = last; c < first + width; ++c) scores[q * width + c - first] = HIDDEN;
    hide_unseen(first, last,
                [&](int64_t q, int64_t c) { scores[q * width + c - first] = HIDDEN; });
  }

  // Scores become weights; their total.
  float weigh(float* scores, int64_t first, int64_t last, int64_t width) const {
    Vector largest = all(HIDDEN), totals{};
    for (int64_t c = 0; c < width; c += LANES) {
      const Vector value = load(scores + c);
      largest = value > largest ? value : largest;
    }
    float top = HIDDEN;
    for (int64_t lane = 0; lane < LANES; ++lane) top = std::max(top, largest[lane]);
    for (int64_t c = 0; c < width; c += LANES) {
      const Vector value = load(scores + c);
      store(scores + c, value > HIDDEN ? exp_of(value - top) : Vector{});
    }
    const int64_t context = std::max(first, std::min(request->context, last)) - first;
    int64_t c = 0;
    for (; c + LANES <= context; c += LANES) totals += load(scores + c);
    totals += load_some(scores + c, std::max<int64_t>(context - c, 0));
    for (c = request->context; c < last; ++c)
      totals[request->own_positions[c - request->context] % LANES] += scores[c - first];
    return sum_of_lanes(totals);
  }

  // Adds the values of dimensions d, ..., d + span - 1.
  template <int Q, bool WHOLE>
  void mix_span(const float* weights, const float* totals, int64_t first, int64_t last,
                int64_t width, int64_t d, int64_t span) const {
    Vector sums[Q][SPAN] = {};
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
          sums[q][i] = fma(parts[i], weights[q * width + c - first], sums[q][i]);
    }
    for (int64_t q = 0; q < Q; ++q)
      for (int64_t i = 0; i < SPAN; ++i)
        if (span > i * LANES)
          store_some(out(q) + d + i * LANES, sums[q][i] / totals[q], span - i * LANES);
  }

  template <int Q>
  void mix(const float* weights, const float* totals, int64_t first, int64_t last,
           int64_t width) const {
    for (int64_t d = 0; d < call->head_dim; d += SPAN * LANES) {
      const int64_t span = std::min(SPAN * LANES, call->head_dim - d);
      if (span == SPAN * LANES)
        mix_span<Q, true>(weights, totals, first, last, width, d, span);
      else
        mix_span<Q, false>(weights, totals, first, last, width, d, span);
    }
  }

  void run() const {
    const int64_t first = first_column(), last = last_column();
    const int64_t width = aligned(last - first + LANES - 1);
    float* queries = scratch<float>(count * (call->head_dim + width));
    float* scores = queries + count * call->head_dim;
    score(queries, scores, first, last, width);
    float totals[FEW];
    for (int64_t q = 0; q < count; ++q) totals[q] = weigh(scores + q * width, first, last, width);
    switch (count) {
      case 1: return mix<1>(scores, totals, first, last, width);
      case 2: return mix<2>(scores, totals, first, last, width);
      case 3: return mix<3>(scores, totals, first, last, width);
      default: return mix<4>(scores, totals, first, last, width);
    }
  }
};

// One query a lane.
struct ManyQueries : Block {
  static constexpr int64_t QUARTER = LANES / 4;

  // Scores of N columns, in the order of `FewQueries::score_group`: dimensions d, d + LANES, ...
  // have a sum of their own, and four of these sums, a quarter of the lanes apart, are taken at
  // once.
  template <int64_t N, bool WHOLE>
  void score_columns(const Vector* query, int64_t column, Vector* to) const {
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
  void score_all(const Vector* queries, Vector* scores, int64_t first, int64_t last) const {
    int64_t c = first;
    for (; c + ABREAST <= last; c += ABREAST)
      score_columns<ABREAST, WHOLE>(queries, c, scores + c - first);
    for (; c < last; ++c) score_columns<1, WHOLE>(queries, c, scores + c - first);
  }

  void score(Vector* queries, Vector* scores, int64_t first, int64_t last) const {
    for (int64_t lane = 0; lane < LANES; ++lane) {
      const float* from = query(std::min(lane, count - 1));
      for (int64_t d = 0; d < call->head_dim; ++d) queries[d][lane] = call->scaling * from[d];
    }
    if (call->head_dim % LANES)
      score_all<false>(queries, scores, first, last);
    else
      score_all<true>(queries, scores, first, last);
    if (call->softcap)
      for (int64_t c = 0; c < last - first; ++c) scores[c] = capped(scores[c], *call->softcap);
    hide_unseen(first, last,
                [&](int64_t q, int64_t column) { scores[column - first][q] = HIDDEN; });
  }

  Vector weigh(Vector* scores, int64_t first, int64_t last) const {
    Vector largest = all(HIDDEN), totals[LANES] = {};
    for (int64_t c = 0; c < last - first; ++c)
      largest = scores[c] > largest ? scores[c] : largest;
    for (int64_t c = first; c < last; ++c) {
      Vector& value = scores[c - first];
      value = value > HIDDEN ? exp_of(value - largest) : Vector{};
      const int64_t own = c - request->context;
      totals[(own < 0 ? c : request->own_positions[own]) % LANES] += value;
    }
    return sum_in_halves(totals);
  }

  // Adds the values of dimensions d, ..., d + width - 1; all CHUNK where WHOLE.
  template <bool WHOLE>
  void mix_chunk(const Vector* weights, Vector total, int64_t first, int64_t last, int64_t d,
                 int64_t width) const {
    Vector sums[CHUNK] = {};
    for (int64_t c = first; c < last; ++c) {
      const float* v = value(c) + d;
      const Vector weight = weights[c - first];
      for (int64_t i = 0; i < CHUNK; ++i)
        if (WHOLE || i < width) sums[i] = fma(weight, v[i], sums[i]);
    }
    for (int64_t i = 0; i < CHUNK; ++i) sums[i] = sums[i] / total;
    for (int64_t lane = 0; lane < count; ++lane) {
      float* to = out(lane) + d;
      for (int64_t i = 0; i < (WHOLE ? CHUNK : width); ++i) to[i] = ((const float*)&sums[i])[lane];
    }
  }

  void mix(const Vector* weights, Vector total, int64_t first, int64_t last) const {
    for (int64_t d = 0; d < call->head_dim; d += CHUNK) {
      const int64_t width = std::min(CHUNK, call->head_dim - d);
      if (width == CHUNK)
        mix_chunk<true>(weights, total, first, last, d, width);
      else
        mix_chunk<false>(weights, total, first, last, d, width);
    }
  }

  void run() const {
    const int64_t first = first_column(), last = last_column();
    Vector* queries = scratch<Vector>(call->head_dim + last - first);
    Vector* scores = queries + call->head_dim;
    score(queries, scores, first, last);
    const Vector total = weigh(scores, first, last);
    mix(scores, total, first, last);
  }
};

// Whole vectors of queries, then what is left, a few at a time.
std::vector<Block> blocks_of(const Call& call) {
  std::vector<Block> blocks;
  for (const Request& request : now.requests)
    for (int64_t kv_head = 0; kv_head < call.kv_heads; ++kv_head) {
      const int64_t queries = (request.last - request.first) * call.share();
      for (int64_t begin = 0; begin < queries;) {
        const int64_t left = queries - begin;
        const int64_t count = std::min(left, left >= MANY ? LANES : FEW);
        blocks.push_back({&call, &request, kv_head, begin, count});
        begin += count;
      }
    }
  return blocks;
}

}  // namespace

void attend_step(const Call& call) {
  const std::vector<Block> blocks = blocks_of(call);
  // Contexts differ in length: a thread that is done takes the next block.
  std::atomic<size_t> next{0};
  parallel(blocks.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const size_t at = next++;
      if (blocks[at].count >= MANY)
        ManyQueries{blocks[at]}.run();
      else
        FewQueries{blocks[at]}.run();
    }
  });
}

}  // namespace draftline
