// Some queries of one request and one key/value head, whose softmax is taken tile by tile.
#pragma once

#include <algorithm>

#include "attention.h"
#include "vectors.h"

namespace draftline {

// Positions of a tile; a multiple of LANES.
constexpr int64_t TILE = 64;

struct Queries {
  const Call* call;
  const Request* request;
  int64_t kv_head, begin, count;
  float* state;  // `state_size` floats between `start` and `finish`

  // Room for what `count` queries have: scaled, weighted sums of values, totals, largest scores.
  static int64_t state_size(const Call& call, int64_t count) {
    return count * (2 * call.head_dim + 2 * LANES);
  }

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

  // The first column of the context that any query sees.
  int64_t first_column() const {
    int64_t lowest = request->context;
    for (int64_t q = 0; q < count; ++q) lowest = std::min(lowest, first_seen(q));
    return lowest;
  }

  // Columns behind the last one that any query sees.
  int64_t last_column() const {
    const int64_t all = request->columns();
    return request->mask ? all : std::min(all, request->context + row(count - 1) + 1);
  }

  // Calls hide(query, column) for each of these columns that a query does not see.
  template <typename Hide>
  void hide_unseen(int64_t first, int64_t last, Hide hide) const {
    const int64_t context = request->context, behind = std::max(first, context);
    for (int64_t q = 0; q < count; ++q) {
      const int64_t seen = std::min(first_seen(q), last);
      for (int64_t c = first; c < seen; ++c) hide(q, c);
      if (request->mask) {
        const uint8_t* visible = request->mask + row(q) * request->owns();
        for (int64_t c = behind; c < last; ++c)
          if (!visible[request->own[c - context]]) hide(q, c);
      } else {
        for (int64_t c = std::max(first, context + row(q) + 1); c < last; ++c) hide(q, c);
      }
      if (!call->window) continue;
      const int64_t lowest = position(q) - *call->window;
      for (int64_t c = behind; c < last; ++c)
        if (request->position(c) <= lowest) hide(q, c);
    }
  }
};

// The factor of earlier sums when the largest score changes; both scores are HIDDEN before the
// first column.
inline Vector rescaling(Vector before, Vector largest) {
  return before > HIDDEN ? exp_of(before - largest) : Vector{};
}

}  // namespace draftline
