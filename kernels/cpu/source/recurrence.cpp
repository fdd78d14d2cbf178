// Token trees through layers that keep a state: `kernels/recurrence/walk.py`, which says what the
// arguments are.
//
// A column of a head's state does not depend on other columns. So a part of the work is a few
// columns of one head: it goes over all rows of the step, with the states before it in the caches.
// A row's numbers are sums over the channels of the state before it, in a fixed order: they do not
// depend on other rows, nor on who computes them.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "team.h"
#include "vectors.h"

namespace draftline {
namespace {

// Sums of every other channel each, so that additions do not wait for one another.
constexpr int64_t CHAINS = 2;
constexpr int64_t NOWHERE = -1;

// A row of the step, or one whose delta is known: `own` is -1. `source` and `target` are buffers,
// or -1 - slot.
struct Place {
  int32_t row, own, source, target;
};

struct Sizes {
  int64_t heads, key_heads, key_dim, value_dim, decays;
};

struct Rows {
  Sizes size;
  float* states;
  const float *keys, *log_decays;
  float* deltas;
  const float *values, *rates, *queries;  // no rates: what a row adds is its value
  float* outputs;
  const Place* order;
  int64_t count;
  std::vector<bool> goes_on;  // whether the state behind each is read
};

// What a row does with each channel of a head.
struct Channels {
  std::vector<float> decays, keys, queries;  // the latter ones times the decays
  float product;                             // of key and query

  explicit Channels(int64_t key_dim) : decays(key_dim), keys(key_dim), queries(key_dim) {}

  void read(const Rows& rows, const Place& place, int64_t head) {
    const auto [heads, key_heads, dim, value_dim, count] = rows.size;
    const int64_t key_head = head / (heads / key_heads);
    const float* log_decays = rows.log_decays + (place.row * heads + head) * count;
    const float* key = rows.keys + (place.row * key_heads + key_head) * dim;
    const float* query = rows.queries + (place.own * key_heads + key_head) * dim;
    const Vector one = exp_of(all(log_decays[0]));
    Vector products{};
    for (int64_t i = 0; i < dim; i += LANES) {
      const int64_t left = dim - i;
      const Vector decay = count == 1 ? one : exp_of(load_some(log_decays + i, left));
      store_some(decays.data() + i, decay, left);
      if (place.own < 0) continue;
      const Vector k = load_some(key + i, left), q = load_some(query + i, left);
      store_some(keys.data() + i, k * decay, left);
      store_some(queries.data() + i, q * decay, left);
      products = fma(k, q, products);
    }
    product = sum_of_lanes(products);
  }
};

// Some columns of one channel of a state; zeros for those behind the last.
struct alignas(sizeof(float) * LANES) Line {
  Vector parts[VECTORS];
};
// All channels, [key_dim].
using Tile = Line*;

// Columns `first` and following of one head.
class Part {
 public:
  Part(const Rows& rows, int64_t head, int64_t first, Tile tiles)
      : rows_(rows), head_(head), first_(first), tiles_(tiles), channels_(rows.size.key_dim),
        left_(std::min(PANEL, rows.size.value_dim - first)) {}

  void run() {
    for (int64_t index = 0; index < rows_.count; ++index) {
      const Place& place = rows_.order[index];
      const Tile before = tile(place.source);
      channels_.read(rows_, place, head_);
      Vector delta[VECTORS];
      float* own_delta = at(rows_.deltas, place.row);
      if (place.own >= 0) {
        find(before, place.own, delta);
        for (int64_t j = 0; j < VECTORS; ++j) put(own_delta, j, delta[j]);
      } else {
        for (int64_t j = 0; j < VECTORS; ++j) delta[j] = get(own_delta, j);
      }
      if (rows_.goes_on[index]) advance(before, delta, place);
    }
    write_back();
  }

 private:
  // The delta of a row, and its output.
  void find(const Tile before, int64_t own, Vector* delta) {
    const int64_t dim = rows_.size.key_dim;
    Vector found[CHAINS][VECTORS]{}, read[CHAINS][VECTORS]{};
    const auto add = [&](int64_t channel, int64_t chain) {
      const Vector key = all(channels_.keys[channel]), query = all(channels_.queries[channel]);
      for (int64_t j = 0; j < VECTORS; ++j) {
        const Vector state = before[channel].parts[j];
        found[chain][j] = fma(state, key, found[chain][j]);
        read[chain][j] = fma(state, query, read[chain][j]);
      }
    };
    int64_t channel = 0;
    for (; channel + CHAINS <= dim; channel += CHAINS)
      for (int64_t chain = 0; chain < CHAINS; ++chain) add(channel + chain, chain);
    for (; channel < dim; ++channel) add(channel, 0);
    const float* values = at(rows_.values, own);
    for (int64_t j = 0; j < VECTORS; ++j) {
      for (int64_t chain = 1; chain < CHAINS; ++chain) {
        found[0][j] += found[chain][j];
        read[0][j] += read[chain][j];
      }
      delta[j] = get(values, j);
      if (rows_.rates) delta[j] = (delta[j] - found[0][j]) * rows_.rates[own * rows_.size.heads + head_];
      put(at(rows_.outputs, own), j, fma(delta[j], channels_.product, read[0][j]));
    }
  }

  // The state behind a row.
  void advance(const Tile before, const Vector* delta, const Place& place) {
    const Tile behind = tile(place.target);
    const float* keys = at_key(place.row);
    for (int64_t channel = 0; channel < rows_.size.key_dim; ++channel) {
      const Vector key = all(keys[channel]), decay = all(channels_.decays[channel]);
      for (int64_t j = 0; j < VECTORS; ++j) {
        behind[channel].parts[j] = fma(delta[j], key, before[channel].parts[j] * decay);
      }
    }
    if (place.target < 0) is_changed_ = true;
  }

  // Where a state is; that of a slot is copied here first.
  Tile tile(int64_t place) {
    if (place >= 0) return tiles_ + (1 + place) * rows_.size.key_dim;
    const int64_t slot = -1 - place;
    if (slot != slot_) {
      write_back();
      slot_ = slot;
      each_line([&](const float* line, Line& own) {
        for (int64_t j = 0; j < VECTORS; ++j) own.parts[j] = get(line, j);
      });
    }
    return tiles_;
  }

  void write_back() {
    if (!is_changed_) return;
    each_line([&](float* line, const Line& own) {
      for (int64_t j = 0; j < VECTORS; ++j) put(line, j, own.parts[j]);
    });
    is_changed_ = false;
  }

  template <typename Work>
  void each_line(Work work) {
    const auto [heads, key_heads, dim, value_dim, decays] = rows_.size;
    float* state = rows_.states + (slot_ * heads + head_) * dim * value_dim + first_;
    for (int64_t channel = 0; channel < dim; ++channel)
      work(state + channel * value_dim, tiles_[channel]);
  }

  // The columns of a row of [rows, heads, value_dim].
  template <typename Number>
  Number* at(Number* rows, int64_t row) const {
    return rows + (row * rows_.size.heads + head_) * rows_.size.value_dim + first_;
  }

  const float* at_key(int64_t row) const {
    const auto [heads, key_heads, dim, value_dim, decays] = rows_.size;
    return rows_.keys + (row * key_heads + head_ / (heads / key_heads)) * dim;
  }

  Vector get(const float* line, int64_t j) const {
    return j * LANES < left_ ? load_some(line + j * LANES, left_ - j * LANES) : Vector{};
  }

  void put(float* line, int64_t j, Vector value) const {
    if (j * LANES < left_) store_some(line + j * LANES, value, left_ - j * LANES);
  }

  const Rows& rows_;
  const int64_t head_, first_;
  Tile tiles_;  // of the slot, then the buffers
  Channels channels_;
  const int64_t left_;
  int64_t slot_ = NOWHERE;
  bool is_changed_ = false;
};

// Nobody reads the state behind most nodes of a tree.
std::vector<bool> going_on(const Place* order, int64_t count, int64_t num_buffers) {
  std::vector<bool> goes_on(count), is_read(num_buffers);
  for (int64_t index = count - 1; index >= 0; --index) {
    const auto [row, own, source, target] = order[index];
    goes_on[index] = target < 0 || is_read[target];
    if (target >= 0) is_read[target] = false;
    if (source >= 0) is_read[source] = true;
  }
  return goes_on;
}

const float* checked(const at::Tensor& tensor, at::IntArrayRef sizes) {
  TORCH_CHECK(tensor.is_contiguous() && tensor.scalar_type() == at::kFloat && tensor.sizes() == sizes,
              "recurrence: another shape");
  return tensor.const_data_ptr<float>();
}

at::Tensor recurrence(const at::Tensor& states, const at::Tensor& keys, const at::Tensor& log_decays,
                      const at::Tensor& deltas, const at::Tensor& values,
                      const std::optional<at::Tensor>& rates, const at::Tensor& queries,
                      const at::Tensor& order) {
  TORCH_CHECK(states.dim() == 4 && keys.dim() == 3 && log_decays.dim() == 3 && values.dim() == 3);
  const int64_t slots = states.size(0), kept = keys.size(0), rows = values.size(0);
  const Sizes size{states.size(1), keys.size(1), states.size(2), states.size(3), log_decays.size(2)};
  const auto [heads, key_heads, key_dim, value_dim, decays] = size;
  TORCH_CHECK(heads % key_heads == 0 && (decays == 1 || decays == key_dim));
  TORCH_CHECK(order.is_contiguous() && order.scalar_type() == at::kInt && order.dim() == 2 &&
              order.size(1) == 4);
  const Place* places = reinterpret_cast<const Place*>(order.const_data_ptr<int32_t>());
  int64_t num_buffers = 0;
  for (int64_t index = 0; index < order.size(0); ++index) {
    const auto [row, own, source, target] = places[index];
    TORCH_CHECK(0 <= row && row < kept && own < rows && source >= -slots && target >= -slots &&
                source < order.size(0) && target < order.size(0), "recurrence: no such row");
    num_buffers = std::max<int64_t>({num_buffers, source + 1, target + 1});
  }
  checked(states, states.sizes());
  checked(deltas, {kept, heads, value_dim});
  at::Tensor outputs = at::empty(values.sizes(), values.options());
  const Rows work{size, states.data_ptr<float>(), checked(keys, {kept, key_heads, key_dim}),
                  checked(log_decays, {kept, heads, decays}), deltas.data_ptr<float>(),
                  checked(values, {rows, heads, value_dim}),
                  rates ? checked(*rates, {rows, heads}) : nullptr,
                  checked(queries, {rows, key_heads, key_dim}), outputs.data_ptr<float>(),
                  places, order.size(0), going_on(places, order.size(0), num_buffers)};
  const int64_t parts = (value_dim + PANEL - 1) / PANEL;
  parallel(heads * parts, 1, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<Line[]> tiles(new Line[(1 + num_buffers) * size.key_dim]);
    for (int64_t part = begin; part < end; ++part)
      Part(work, part / parts, part % parts * PANEL, tiles.get()).run();
  });
  return outputs;
}

}  // namespace
}  // namespace draftline

TORCH_LIBRARY_FRAGMENT(draftline, library) {
  library.def(
      "recurrence(Tensor(a!) states, Tensor keys, Tensor log_decays, Tensor(b!) deltas, Tensor "
      "values, Tensor? rates, Tensor queries, Tensor order) -> Tensor");
}

TORCH_LIBRARY_IMPL(draftline, CPU, library) {
  library.impl("recurrence", &draftline::recurrence);
}
