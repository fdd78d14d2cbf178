// A step's attention over a paged KV cache, with the trees' masks.
//
// Queries that share a key/value head lie side by side in a vector, one query a lane; keys and
// values are broadcast to them. A lane computes the same operations in the same order whatever is
// in the others, and a column that it does not see adds exactly nothing: a row's result does not
// depend on the rows beside it, bit by bit.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

namespace {
constexpr int64_t LANES = DRAFTLINE_LANES;
// Values of a head whose sums stay in registers.
constexpr int64_t CHUNK = LANES == 16 ? 16 : 8;
constexpr float HIDDEN = -std::numeric_limits<float>::infinity();

typedef float Vector __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4), aligned(4)));

struct Request {
  int64_t first, last;               // its rows of the step
  int64_t context;                   // columns that all its rows see; its own come behind them
  const uint8_t* mask;               // [rows, own columns]; null: each row sees those up to itself
  std::vector<int64_t> slots;        // of all columns
  std::vector<int32_t> positions;    // of all columns
};

struct Step {
  at::Tensor kv;  // [layers, slots, 2, kv_heads, head_dim]
  at::Tensor slots, positions, mask;
  std::vector<Request> requests;
};

thread_local Step now;

struct Call {
  const float* heads;
  float* out;
  const float* kv;
  int64_t num_heads, kv_heads, all_heads, head_dim;
  float scaling;
  std::optional<int64_t> window;
  std::optional<double> softcap;
};

Vector exp_of(Vector x) {  // Cephes' polynomial
  x = x < -87.0f ? Vector{} - 87.0f : x;
  x = x > 88.0f ? Vector{} + 88.0f : x;
  const Vector n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
  const Vector r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vector y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
  const Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
  return y * (Vector)power;
}

Vector capped(Vector x, float cap) {  // cap * tanh(x / cap)
  const Vector twice = exp_of(x * (2.0f / cap));
  return cap - (2.0f * cap) / (twice + 1.0f);
}

// Up to LANES queries of one request and one key/value head.
struct Block {
  const Call& call;
  const Request& request;
  int64_t kv_head, lanes;
  int64_t row[LANES], head[LANES];

  Block(const Call& c, const Request& r, int64_t kv_head_, int64_t begin)
      : call(c), request(r), kv_head(kv_head_) {
    const int64_t share = c.num_heads / c.kv_heads;
    lanes = std::min(LANES, (r.last - r.first) * share - begin);
    for (int64_t lane = 0; lane < LANES; ++lane) {
      const int64_t query = begin + std::min(lane, lanes - 1);
      row[lane] = query / share;
      head[lane] = kv_head * share + query % share;
    }
  }

  const float* key(int64_t column) const {
    const int64_t pair = request.slots[column] * 2;
    return call.kv + (pair * call.kv_heads + kv_head) * call.head_dim;
  }

  bool sees(int64_t lane, int64_t column, int32_t position) const {
    if (call.window && position - request.positions[column] >= *call.window) return false;
    const int64_t own = column - request.context;
    if (own < 0) return true;
    const int64_t owns = request.slots.size() - request.context;
    return request.mask ? request.mask[row[lane] * owns + own] : own <= row[lane];
  }

  // Columns behind the last one that any lane sees.
  int64_t columns() const {
    const int64_t all = request.slots.size();
    return request.mask ? all : std::min(all, request.context + row[lanes - 1] + 1);
  }

  // Several columns at once, so that a sum need not wait for its last addition.
  template <int N>
  void multiply(const std::vector<Vector>& query, int64_t column, std::vector<Vector>& to) const {
    const float* keys[N];
    Vector sums[N] = {};
    for (int n = 0; n < N; ++n) keys[n] = key(column + n);
    for (int64_t d = 0; d < call.head_dim; ++d)
      for (int n = 0; n < N; ++n) sums[n] += query[d] * keys[n][d];
    for (int n = 0; n < N; ++n) to[column + n] = sums[n];
  }

  void score(std::vector<Vector>& scores, const int32_t* positions) const {
    std::vector<Vector> query(call.head_dim);
    for (int64_t d = 0; d < call.head_dim; ++d)
      for (int64_t lane = 0; lane < LANES; ++lane)
        query[d][lane] = call.scaling *
            call.heads[((request.first + row[lane]) * call.all_heads + head[lane]) * call.head_dim + d];
    const int64_t count = scores.size();
    int64_t column = 0;
    for (; column + 4 <= count; column += 4) multiply<4>(query, column, scores);
    for (; column < count; ++column) multiply<1>(query, column, scores);
    if (call.softcap)
      for (Vector& value : scores) value = capped(value, *call.softcap);
    for (int64_t c = call.window ? 0 : request.context; c < count; ++c)
      for (int64_t lane = 0; lane < LANES; ++lane)
        if (!sees(lane, c, positions[request.first + row[lane]])) scores[c][lane] = HIDDEN;
  }

  void mix(const std::vector<Vector>& weights, Vector total) const {
    for (int64_t d = 0; d < call.head_dim; d += CHUNK) {
      const int64_t width = std::min(CHUNK, call.head_dim - d);
      Vector sums[CHUNK] = {};
      for (size_t column = 0; column < weights.size(); ++column) {
        const float* v = key(column) + call.kv_heads * call.head_dim + d;
        const Vector weight = weights[column];
        if (width == CHUNK)
          for (int64_t i = 0; i < CHUNK; ++i) sums[i] += weight * v[i];
        else
          for (int64_t i = 0; i < width; ++i) sums[i] += weight * v[i];
      }
      for (int64_t i = 0; i < width; ++i) {
        const Vector result = sums[i] / total;
        for (int64_t lane = 0; lane < lanes; ++lane)
          call.out[((request.first + row[lane]) * call.num_heads + head[lane]) * call.head_dim +
                   d + i] = result[lane];
      }
    }
  }

  void run(const int32_t* positions) const {
    std::vector<Vector> scores(columns());
    score(scores, positions);
    Vector largest = Vector{} + HIDDEN, total{};
    for (const Vector& value : scores) largest = value > largest ? value : largest;
    for (Vector& value : scores) {
      value = value > HIDDEN ? exp_of(value - largest) : Vector{};
      total += value;
    }
    mix(scores, total);
  }
};

void begin_step(const at::Tensor& kv, int64_t block_size, const at::Tensor& slots,
                const at::Tensor& positions, const at::Tensor& starts, const at::Tensor& contexts,
                const at::Tensor& tables, const at::Tensor& tree_starts, const at::Tensor& tree_slots,
                const at::Tensor& tree_positions, const at::Tensor& mask) {
  now = Step{kv, slots, positions, mask, {}};
  const int32_t* start = starts.const_data_ptr<int32_t>();
  const int32_t* tree = tree_starts.const_data_ptr<int32_t>();
  const uint8_t* visible = mask.const_data_ptr<uint8_t>();
  for (int64_t index = 0; index < contexts.size(0); ++index) {
    Request request{start[index], start[index + 1], contexts.const_data_ptr<int32_t>()[index]};
    const int64_t rows = request.last - request.first;
    if (rows == 0) continue;
    const int32_t* table = tables.const_data_ptr<int32_t>() + index * tables.size(1);
    for (int64_t p = 0; p < request.context; ++p) {
      request.slots.push_back(int64_t{table[p / block_size]} * block_size + p % block_size);
      request.positions.push_back(p);
    }
    const int64_t owns = tree[index + 1] - tree[index];
    const int32_t* own_slots = slots.const_data_ptr<int32_t>() + request.first;
    const int32_t* own_positions = positions.const_data_ptr<int32_t>() + request.first;
    if (owns) {
      own_slots = tree_slots.const_data_ptr<int32_t>() + tree[index];
      own_positions = tree_positions.const_data_ptr<int32_t>() + tree[index];
      request.mask = visible;
      visible += rows * owns;
    }
    for (int64_t own = 0; own < (owns ? owns : rows); ++own) {
      request.slots.push_back(own_slots[own]);
      request.positions.push_back(own_positions[own]);
    }
    now.requests.push_back(std::move(request));
  }
}

at::Tensor attend(const at::Tensor& heads, int64_t layer, int64_t num_heads, double scaling,
                  std::optional<int64_t> window, std::optional<double> softcap) {
  TORCH_CHECK(heads.dim() == 3 && heads.is_contiguous() && heads.scalar_type() == at::kFloat);
  TORCH_CHECK(now.kv.defined() && heads.size(0) == now.slots.size(0), "attend: another step");
  const int64_t kv_heads = now.kv.size(3), head_dim = now.kv.size(4), pair = 2 * kv_heads * head_dim;
  TORCH_CHECK(heads.size(1) == num_heads + 2 * kv_heads && heads.size(2) == head_dim);
  float* kv = now.kv.data_ptr<float>() + layer * now.kv.stride(0);
  const float* rows = heads.const_data_ptr<float>();
  const int32_t* slots = now.slots.const_data_ptr<int32_t>();
  for (int64_t row = 0; row < heads.size(0); ++row)
    std::memcpy(kv + slots[row] * pair, rows + (row * heads.size(1) + num_heads) * head_dim,
                pair * sizeof(float));
  at::Tensor out = at::empty({heads.size(0), num_heads * head_dim}, heads.options());
  const Call call{rows, out.data_ptr<float>(), kv, num_heads, kv_heads, heads.size(1), head_dim,
                  static_cast<float>(scaling), window, softcap};
  std::vector<Block> blocks;
  for (const Request& request : now.requests)
    for (int64_t kv_head = 0; kv_head < kv_heads; ++kv_head)
      for (int64_t q = 0; q < (request.last - request.first) * (num_heads / kv_heads); q += LANES)
        blocks.emplace_back(call, request, kv_head, q);
  const int32_t* positions = now.positions.const_data_ptr<int32_t>();
  at::parallel_for(0, blocks.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) blocks[block].run(positions);
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(draftline, library) {
  library.def(
      "begin_step(Tensor kv, int block_size, Tensor slots, Tensor positions, Tensor starts, Tensor "
      "contexts, Tensor tables, Tensor tree_starts, Tensor tree_slots, Tensor tree_positions, Tensor "
      "mask) -> ()");
  library.def("end_step() -> ()", [] { now = Step{}; });
  library.def(
      "attend(Tensor heads, int layer, int num_heads, float scaling, int? window, float? softcap)"
      " -> Tensor");
}

TORCH_LIBRARY_IMPL(draftline, CPU, library) {
  library.impl("begin_step", &begin_step);
  library.impl("attend", &attend);
}
