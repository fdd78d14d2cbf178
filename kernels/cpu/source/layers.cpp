// A stage's decoder layers, one after the other, without Python or library operators between their
// products.
//
// Everything here computes each row separately, in a fixed order: a row does not depend on other
// rows.
#include "layers.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

#include "attention.h"
#include "linear.h"
#include "team.h"
#include "vectors.h"

namespace draftline {
namespace {

// The description of a layer, as written by `models/layers/cpu_layers.py`; change both together.
struct Shape {
  int64_t kv_layer, num_heads, intermediate, activation, window, rotation, flags;
};
constexpr int64_t INTS = 7;
struct Numbers {
  double scaling, softcap, eps;
};
constexpr int64_t FLOATS = 3;
// Tensors of a layer: its vectors one behind the other, then those of its packed weights: of up to
// three for queries, keys and values, one behind attention, up to two for gate and up, one behind.
constexpr int64_t TENSORS = 1 + 7 * PARTS;
enum Flags : int64_t { HEAD_NORMS = 1, POST_NORMS = 2, QKV_BIAS = 4, OUT_BIAS = 8, MLP_BIAS = 16 };
enum Activation : int64_t { SILU = 0, GELU_TANH = 1 };

struct Layer {
  Shape shape;
  Numbers numbers;
  const float *input_norm, *query_norm, *key_norm, *attention_norm, *mlp_norm, *output_norm;
  const float *qkv_bias, *out_bias, *gate_up_bias, *down_bias;
  Weights qkv, out, gate_up, down;
};

// x / sqrt(mean(x^2) + eps) * weight of one row; `to` may be `x`.
void normalise(const float* x, const float* weight, float* to, int64_t size, double eps) {
  Vector squares{};
  for (int64_t i = 0; i < size; i += LANES) {
    const Vector part = load_some(x + i, size - i);
    squares = fma(part, part, squares);
  }
  const float scale = 1.0f / std::sqrt(sum_of_lanes(squares) / size + static_cast<float>(eps));
  for (int64_t i = 0; i < size; i += LANES)
    store_some(to + i, load_some(x + i, size - i) * scale * load_some(weight + i, size - i),
               size - i);
}

template <typename Work>
void each_row(int64_t rows, int64_t size, Work work) {
  parallel(rows, std::max<int64_t>((1 << 14) / size, 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) work(row);
  });
}

void normalise_rows(const float* x, const float* weight, float* to, int64_t rows, int64_t size,
                    double eps) {
  each_row(rows, size, [&](int64_t row) {
    normalise(x + row * size, weight, to + row * size, size, eps);
  });
}

Vector active(Vector x, int64_t activation) {
  // (1 + tanh(y)) / 2 is the sigmoid of 2 y.
  Vector inner = x;
  if (activation == GELU_TANH)
    inner = 1.5957691216057308f * fma(x * x * x, 0.044715f, x);
  return x / (exp_of(-inner) + 1.0f);
}

// activation(left half) * right half of [rows, 2 size], in the left half of its row.
void gate(float* gate_up, int64_t rows, int64_t size, int64_t activation, float* to) {
  each_row(rows, size, [&](int64_t row) {
    const float* left = gate_up + row * 2 * size;
    for (int64_t i = 0; i < size; i += LANES)
      store_some(to + row * size + i,
                 active(load_some(left + i, size - i), activation) *
                     load_some(left + size + i, size - i),
                 size - i);
  });
}

// Turns one head by its position's angles, after normalising it where `norm` is given. The first
// half of the sines is negated.
void turn(float* head, const float* norm, double eps, const float* cos, const float* sin,
          int64_t dim) {
  if (norm) normalise(head, norm, head, dim, eps);
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; i += LANES) {
    const int64_t left = half - i;
    const Vector a = load_some(head + i, left), b = load_some(head + half + i, left);
    store_some(head + i, fma(b, load_some(sin + i, left), a * load_some(cos + i, left)), left);
    store_some(head + half + i,
               fma(a, load_some(sin + half + i, left), b * load_some(cos + half + i, left)), left);
  }
}

// What all layers of a stage have alike.
struct Sizes {
  int64_t hidden, kv_heads, head_dim;
};

// Cosines and sines of all positions, [positions, dim] each.
struct Rotation {
  const float *cos, *sin;
};

// A pass of rows over layers, with buffers [rows, ..].
struct Pass : Sizes {
  int64_t rows;
  std::vector<Rotation> rotations;
  float *states, *sums, *normed, *heads, *attended, *gate_up, *gated;

  void run(const Layer& layer) {
    const Shape& shape = layer.shape;
    normalise_rows(states, layer.input_norm, normed, rows, hidden, layer.numbers.eps);
    attend(layer);
    const int64_t attended_size = shape.num_heads * head_dim;
    add({attended, layer.out, nullptr, rows, attended_size, hidden, layer.out_bias},
        layer.attention_norm, layer.numbers.eps);
    normalise_rows(states, layer.mlp_norm, normed, rows, hidden, layer.numbers.eps);
    multiply({normed, layer.gate_up, gate_up, rows, hidden, 2 * shape.intermediate,
              layer.gate_up_bias});
    gate(gate_up, rows, shape.intermediate, shape.activation, gated);
    add({gated, layer.down, nullptr, rows, shape.intermediate, hidden, layer.down_bias},
        layer.output_norm, layer.numbers.eps);
  }

  // states += product, which is normalised first where the model does.
  void add(Product product, const float* norm, double eps) {
    product.out = sums;
    if (!norm) product.residual = states;
    multiply(product);
    if (norm)
      each_row(rows, hidden, [&](int64_t row) {
        float* sum = sums + row * hidden;
        normalise(sum, norm, sum, hidden, eps);
        for (int64_t i = 0; i < hidden; ++i) sum[i] += states[row * hidden + i];
      });
    std::swap(states, sums);
  }

  void attend(const Layer& layer) {
    const Shape& shape = layer.shape;
    const int64_t turned = shape.num_heads + kv_heads, all = turned + kv_heads;
    multiply({normed, layer.qkv, heads, rows, hidden, all * head_dim, layer.qkv_bias});
    const int32_t* positions = now.positions.const_data_ptr<int32_t>();
    const Rotation& table = rotations[shape.rotation];
    each_row(rows, turned * head_dim, [&](int64_t row) {
      const int64_t angle = int64_t{positions[row]} * head_dim;
      for (int64_t head = 0; head < turned; ++head)
        turn(heads + (row * all + head) * head_dim,
             head < shape.num_heads ? layer.query_norm : layer.key_norm, layer.numbers.eps,
             table.cos + angle, table.sin + angle, head_dim);
    });
    Call call{heads, attended, now.kv.data_ptr<float>() + shape.kv_layer * now.kv.stride(0),
              positions, shape.num_heads, kv_heads, all, head_dim,
              static_cast<float>(layer.numbers.scaling), std::nullopt, std::nullopt};
    if (shape.window > 0) call.window = shape.window;
    if (layer.numbers.softcap > 0) call.softcap = layer.numbers.softcap;
    write_kv(call);
    attend_step(call);
  }
};

const float* checked(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.is_contiguous() && tensor.scalar_type() == at::kFloat);
  return tensor.const_data_ptr<float>();
}

Layer read_layer(const at::Tensor* tensors, const Shape& shape, const Numbers& numbers,
                 const Sizes& sizes) {
  Layer layer{};
  layer.shape = shape, layer.numbers = numbers;
  const float* next = checked(tensors[0]);
  const float* end = next + tensors[0].numel();
  const auto take = [&](bool is_there, int64_t size) -> const float* {
    const float* begin = next;
    next += is_there ? size : 0;
    return is_there ? begin : nullptr;
  };
  const int64_t heads = (shape.num_heads + 2 * sizes.kv_heads) * sizes.head_dim;
  const int64_t flags = shape.flags, hidden = sizes.hidden;
  layer.input_norm = take(true, hidden);
  layer.mlp_norm = take(true, hidden);
  layer.attention_norm = take(flags & POST_NORMS, hidden);
  layer.output_norm = take(flags & POST_NORMS, hidden);
  layer.query_norm = take(flags & HEAD_NORMS, sizes.head_dim);
  layer.key_norm = take(flags & HEAD_NORMS, sizes.head_dim);
  layer.qkv_bias = take(flags & QKV_BIAS, heads);
  layer.out_bias = take(flags & OUT_BIAS, hidden);
  layer.gate_up_bias = take(flags & MLP_BIAS, 2 * shape.intermediate);
  layer.down_bias = take(flags & MLP_BIAS, hidden);
  TORCH_CHECK(next == end, "layers: vectors of another size");
  const auto weights = [&](int64_t first, int64_t inputs, at::IntArrayRef outputs) {
    return Weights::of({tensors + 1 + first * PARTS, outputs.size() * PARTS}, inputs, outputs);
  };
  const int64_t queries = shape.num_heads * sizes.head_dim, keys = sizes.kv_heads * sizes.head_dim;
  layer.qkv = weights(0, hidden, {queries, keys, keys});
  layer.out = weights(3, queries, hidden);
  layer.gate_up = weights(4, hidden, {shape.intermediate, shape.intermediate});
  layer.down = weights(6, shape.intermediate, hidden);
  return layer;
}

}  // namespace

struct Layers::Parts {
  Sizes sizes;
  // Keeps the numbers that the layers point to.
  std::vector<at::Tensor> tensors;
  std::vector<Layer> layers;
  int64_t most_heads = 0, widest = 0;
};

Layers::Layers(std::vector<at::Tensor> tensors, const std::vector<int64_t>& shapes,
               const std::vector<double>& numbers, int64_t hidden, int64_t kv_heads,
               int64_t head_dim)
    : parts_(new Parts{{hidden, kv_heads, head_dim}, std::move(tensors)}) {
  const int64_t count = shapes.size() / INTS;
  TORCH_CHECK(parts_->tensors.size() == size_t(count * TENSORS) &&
              numbers.size() == size_t(count * FLOATS));
  for (int64_t index = 0; index < count; ++index) {
    const int64_t* s = shapes.data() + index * INTS;
    const double* n = numbers.data() + index * FLOATS;
    parts_->layers.push_back(read_layer(parts_->tensors.data() + index * TENSORS,
                                        {s[0], s[1], s[2], s[3], s[4], s[5], s[6]},
                                        {n[0], n[1], n[2]}, parts_->sizes));
    parts_->most_heads = std::max(parts_->most_heads, s[1]);
    parts_->widest = std::max(parts_->widest, s[2]);
  }
}

Layers::~Layers() = default;

int64_t Layers::size() const { return parts_->layers.size(); }

at::Tensor Layers::run(at::Tensor states, at::TensorList rotations, int64_t first,
                       int64_t last) const {
  const auto& [sizes, tensors, layers, most_heads, widest] = *parts_;
  const int64_t rows = states.size(0);
  TORCH_CHECK(states.dim() == 2 && states.size(1) == sizes.hidden && now.kv.defined() &&
                  rows == now.rows() && now.kv.size(3) == sizes.kv_heads &&
                  now.kv.size(4) == sizes.head_dim,
              "layers: another step");
  TORCH_CHECK(0 <= first && first <= last && last <= size(), "layers: no such layers");
  Pass pass{sizes, rows};
  for (size_t i = 0; i + 1 < rotations.size(); i += 2)
    pass.rotations.push_back({checked(rotations[i]), checked(rotations[i + 1])});
  std::vector<at::Tensor> buffers;
  const auto take = [&](int64_t size) {
    buffers.push_back(at::empty({rows, size}, at::kFloat));
    return buffers.back().data_ptr<float>();
  };
  checked(states);
  pass.states = states.data_ptr<float>();
  pass.sums = take(sizes.hidden);
  pass.normed = take(sizes.hidden);
  pass.heads = take((most_heads + 2 * sizes.kv_heads) * sizes.head_dim);
  pass.attended = take(most_heads * sizes.head_dim);
  pass.gate_up = take(2 * widest);
  pass.gated = take(widest);
  for (int64_t index = first; index < last; ++index) {
    const int64_t rotation = layers[index].shape.rotation;
    TORCH_CHECK(rotation >= 0 && size_t(rotation) < pass.rotations.size());
    pass.run(layers[index]);
  }
  return pass.states == states.data_ptr<float>() ? states : buffers[0];
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const int64_t size = weight.numel();
  TORCH_CHECK(x.dim() && x.size(-1) == size);
  const at::Tensor rows = x.contiguous();
  at::Tensor out = at::empty(x.sizes(), x.options());
  normalise_rows(checked(rows), checked(weight), out.data_ptr<float>(), x.numel() / size, size, eps);
  return out;
}

at::Tensor soft_cap(const at::Tensor& x, double cap) {
  at::Tensor out = at::empty(x.sizes(), x.options());
  const float* from = checked(x);
  float* to = out.data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); i += LANES)
    store_some(to + i, capped(load_some(from + i, x.numel() - i), cap), x.numel() - i);
  return out;
}

}  // namespace draftline

TORCH_LIBRARY_FRAGMENT(draftline, library) {
  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  library.def("soft_cap(Tensor x, float cap) -> Tensor");
}

TORCH_LIBRARY_IMPL(draftline, CPU, library) {
  library.impl("rms_norm", &draftline::rms_norm);
  library.impl("soft_cap", &draftline::soft_cap);
}
