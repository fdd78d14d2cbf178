// The interface of `sampling.cpp`.
#pragma once

#include <cstdint>

namespace draftline {

// The first of the largest of so many logits.
int64_t argmax(const float* logits, int64_t size);

// The column whose logit plus noise is largest; the best logit is 0. `ids`: those of the columns'
// tokens, where they are others.
int64_t noisy_argmax(const float* scaled, int64_t size, int64_t seed, int64_t position,
                     const int64_t* ids = nullptr);

}  // namespace draftline
