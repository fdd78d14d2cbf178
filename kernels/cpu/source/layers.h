// The interface of `layers.cpp`.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <memory>

namespace draftline {

// Decoder layers as `models/layers/cpu_layers.py` passes them.
struct LayerArguments {
  at::TensorList tensors;
  at::IntArrayRef shapes;
  at::ArrayRef<double> numbers;
  at::TensorList rotations;
};

// The checked layers, with buffers for the rows of the thread's step.
class Layers {
 public:
  Layers(const LayerArguments& arguments, int64_t rows, int64_t hidden);
  ~Layers();

  // Replaces hidden states [rows, hidden] by those after the last layer.
  at::Tensor run(at::Tensor states);

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

// Each row over its root mean square, times `weight`.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);

// cap * tanh(x / cap)
at::Tensor soft_cap(const at::Tensor& x, double cap);

}  // namespace draftline
