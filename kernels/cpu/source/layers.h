// The interface of `layers.cpp`.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <memory>
#include <vector>

namespace draftline {

// The decoder layers of a stage, as `models/layers/cpu_layers.py` describes them. They are checked
// once, since a step of few rows takes little longer than passing all their tensors would.
class Layers : public torch::CustomClassHolder {
 public:
  // hidden: numbers of a row; head_dim: of a head.
  Layers(std::vector<at::Tensor> tensors, const std::vector<int64_t>& shapes,
         const std::vector<double>& numbers, int64_t hidden, int64_t kv_heads, int64_t head_dim);
  ~Layers() override;

  // Hidden states [rows, hidden] of the thread's step before layer `first` to those after the last
  // one before `last`. The given ones are overwritten.
  at::Tensor run(at::Tensor states, at::TensorList rotations, int64_t first, int64_t last) const;

  int64_t size() const;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

// Each row over its root mean square, times `weight`.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);

// cap * tanh(x / cap)
at::Tensor soft_cap(const at::Tensor& x, double cap);

}  // namespace draftline
