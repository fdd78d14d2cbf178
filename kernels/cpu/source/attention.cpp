// A step's attention over a paged KV cache, with the trees' masks.
//
// The cache is read once, tile by tile, for all queries of a request, as in FlashAttention (arXiv
// 2205.14135). Scores are computed tile by tile, and earlier sums are rescaled when a larger score
// appears. Queries that share a key/value head are computed together in one of two ways: a few with
// the head's dimension along the lanes, many with one query a lane. Both add in the same order. So
// a row's result depends bitwise only on what the row sees: not on other rows, on hidden columns,
// or on threads.
//
// The order: a tile has the columns of TILE positions, so that a path has the same tiles in a tree
// and in plain decoding; tiles ascend. A score sums the products of each lane's dimensions (d, d +
// LANES, ...), then the lanes by halves. The total of weights sums those of positions p, p + LANES,
// ..., and at the end these by halves. Values are added in the order of the columns, which ascends
// by position on a path.
#include "attention.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <numeric>

#include "many_queries.h"
#include "team.h"

namespace draftline {

void order_own_columns(Request& request) {
  const int64_t context = request.context;
  request.own.resize(request.owns());
  std::iota(request.own.begin(), request.own.end(), 0);
  const auto tile = [&](int32_t own) { return request.own_positions[own] / TILE; };
  const auto before = [&](int32_t a, int32_t b) { return tile(a) < tile(b); };
  if (std::is_sorted(request.own.begin(), request.own.end(), before)) return;
  std::stable_sort(request.own.begin(), request.own.end(), before);
  const std::vector<int32_t> slots(request.slots.begin() + context, request.slots.end());
  for (int64_t i = 0; i < request.owns(); ++i) request.slots[context + i] = slots[request.own[i]];
}

namespace {

// Queries of a request that are computed at once. More queries read the cache less often; the sums
// of this many stay in the L2 cache.
constexpr int64_t BLOCKS = 16;
// Floats of a cache line.
constexpr int64_t LINE = 16;

// A thread-local buffer of `count` floats, valid until the thread's next call.
float* scratch(int64_t count) {
  static thread_local std::vector<float> values;
  if (static_cast<int64_t>(values.size()) < count) values.resize(count);
  return values.data();
}

// Queries of some key/value heads of a request: those from `begin` to `end` of each.
struct Group {
  const Call* call;
  const Request* request;
  int64_t first_head, last_head, begin, end;

  // Whole vectors of queries, then the rest, a few at a time.
  std::vector<Queries> blocks() const {
    std::vector<Queries> found;
    for (int64_t head = first_head; head < last_head; ++head)
      for (int64_t at = begin, count; at < end; at += count) {
        count = std::min(end - at, end - at >= MANY ? LANES : FEW);
        found.push_back({call, request, head, at, count});
      }
    return found;
  }

  // Behind the columns of the tile that this one begins.
  int64_t tile_end(int64_t column) const {
    const int64_t tile = request->position(column) / TILE;
    if (column < request->context) column = std::min((tile + 1) * TILE, request->context);
    while (column < request->columns() && request->position(column) / TILE == tile) ++column;
    return column;
  }

  // Reads a tile in the order of its addresses, for the hardware prefetcher. The keys of one head,
  // some lines of each slot, are no such stream.
  void touch(int64_t first, int64_t last) const {
    const int64_t pair = 2 * call->kv_heads * call->head_dim;
    const int64_t from = first_head * call->head_dim;
    const int64_t to = (call->kv_heads + last_head) * call->head_dim;
    for (int64_t c = first; c < last; ++c) {
      const volatile float* slot = call->kv + request->slots[c] * pair;
      for (int64_t d = from; d < to; d += LINE) (void)slot[d];
    }
  }

  void run() const {
    std::vector<Queries> found = blocks();
    int64_t first = request->columns(), last = 0, size = 0, widest = TILE + request->owns();
    for (const Queries& block : found) {
      first = std::min(first, block.first_column()), last = std::max(last, block.last_column());
      size += Queries::state_size(*call, block.count >= MANY ? LANES : block.count);
    }
    float* state = scratch(size + (widest + LANES) * std::max(LANES, FEW));
    float* room = state + size;
    for (Queries& block : found) {
      block.state = state;
      state += Queries::state_size(*call, block.count >= MANY ? LANES : block.count);
    }
    for (const Queries& block : found)
      with(block, [](const auto& queries) { queries.start(); });
    for (int64_t c = first / TILE * TILE, end; c < last; c = end) {
      end = tile_end(c);
      touch(c, end);
      for (const Queries& block : found)
        if (const int64_t seen = std::min(end, block.last_column()); c < seen)
          with(block, [&](const auto& queries) { queries.take(c, seen, room); });
    }
    for (const Queries& block : found)
      with(block, [](const auto& queries) { queries.finish(); });
  }

  template <typename Work>
  static void with(const Queries& block, Work work) {
    if (block.count >= MANY)
      work(ManyQueries{block});
    else
      work(FewQueries{block});
  }
};

// All heads of a request together, so that its cache is read once; with fewer than two requests a
// thread the heads are shared out.
std::vector<Group> groups_of(const Call& call) {
  const int64_t requests = now.requests.size(), threads = at::get_num_threads();
  const int64_t parts = std::clamp<int64_t>(2 * threads / std::max<int64_t>(requests, 1), 1,
                                            threads > 1 ? call.kv_heads : 1);
  const int64_t heads = (call.kv_heads + parts - 1) / parts;
  const int64_t most = std::max<int64_t>(1, BLOCKS / heads) * LANES;
  std::vector<Group> groups;
  for (const Request& request : now.requests) {
    const int64_t queries = (request.last - request.first) * call.share();
    for (int64_t head = 0; head < call.kv_heads; head += heads)
      for (int64_t begin = 0; begin < queries; begin += most)
        groups.push_back({&call, &request, head, std::min(head + heads, call.kv_heads), begin,
                          std::min(begin + most, queries)});
  }
  return groups;
}

}  // namespace

void attend_step(const Call& call) {
  const std::vector<Group> groups = groups_of(call);
  // Contexts differ in length, so a finished thread takes the next group.
  std::atomic<size_t> next{0};
  parallel(groups.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) groups[next++].run();
  });
}

}  // namespace draftline
