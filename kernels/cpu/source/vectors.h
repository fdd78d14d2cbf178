// Vectors of floats, as wide as the processor's, and the operations that all kernels share.
//
// Built without contraction: a product and a sum are rounded once where `fma` stands, and twice
// elsewhere, so that two kernels that write the same formula give the same bits.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace draftline {

constexpr int64_t LANES = DRAFTLINE_LANES;
// Vectors of a panel of a packed weight.
constexpr int64_t VECTORS = DRAFTLINE_VECTORS;
constexpr int64_t PANEL = VECTORS * LANES;
constexpr float HIDDEN = -std::numeric_limits<float>::infinity();

typedef float Vector __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2), aligned(2)));
typedef uint8_t Bytes __attribute__((vector_size(LANES), aligned(1)));

// `value` in all lanes: a difference, since x - 0 is always x, while -0 + 0 is 0 and would be
// computed.
inline Vector all(float value) { return value - Vector{}; }

inline Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }

// bfloat16, which is the upper half of a float.
inline Vector load_half(const void* from) {
  return (Vector)(__builtin_convertvector(*static_cast<const Halves*>(from), Ints) << 16);
}

// LANES bytes, in 32 bits each. GCC converts vectors of bytes one by one.
inline Ints load_bytes(const uint8_t* from) {
#if DRAFTLINE_LANES == 16 && defined(__AVX512F__)
  return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif DRAFTLINE_LANES == 8 && defined(__AVX2__)
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#elif DRAFTLINE_LANES == 4 && defined(__ARM_NEON)
  uint32_t four;
  std::memcpy(&four, from, sizeof(four));
  return (Ints)vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)))));
#else
  return __builtin_convertvector(*reinterpret_cast<const Bytes*>(from), Ints);
#endif
}

// The same of signed ones.
inline Ints load_signed_bytes(const uint8_t* from) {
#if DRAFTLINE_LANES == 16 && defined(__AVX512F__)
  return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif DRAFTLINE_LANES == 8 && defined(__AVX2__)
  return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
  return (load_bytes(from) << 24) >> 24;
#endif
}

// Powers of two by their exponents, as e8m0 has them, from 2^-126 on.
inline Vector load_powers(const uint8_t* from) { return (Vector)(load_bytes(from) << 23); }

// The numbers of e2m1 (a sign, two bits of exponent, one of fraction) by their codes of 4 bits.
inline Vector e2m1_of(Ints codes) {
#if DRAFTLINE_LANES == 16 && defined(__AVX512F__)
  const __m512 numbers = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f,
                                        -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
  return (Vector)_mm512_permutexvar_ps((__m512i)codes, numbers);
#elif DRAFTLINE_LANES == 8 && defined(__AVX2__)
  const __m256 numbers = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
  // The lowest three bits alone count.
  const Ints above = (Ints)_mm256_permutevar8x32_ps(numbers, (__m256i)codes);
  return (Vector)(above | (codes & 8) << 28);
#else
  // Twice the number, which is whole. No float of these bits: many were subnormal, and slow.
  const Ints exponent = codes >> 1 & 3, has_exponent = exponent > 0;
  const Ints twice = ((codes & 1) | (has_exponent & 2)) << (exponent + has_exponent);
  return (Vector)((Ints)(__builtin_convertvector(twice, Vector) * 0.5f) | (codes & 8) << 28);
#endif
}

inline void store(float* to, Vector value) { *reinterpret_cast<Vector*>(to) = value; }

// The first `count` floats, zeros behind them.
inline Vector load_some(const float* from, int64_t count) {
  if (count >= LANES) return load(from);
  Vector value{};
  std::memcpy(&value, from, count * sizeof(float));
  return value;
}

inline void store_some(float* to, Vector value, int64_t count) {
  if (count >= LANES) return store(to, value);
  std::memcpy(to, &value, count * sizeof(float));
}

// x * y + z, rounded once where the processor has that.
inline Vector fma(Vector x, Vector y, Vector z) {
#if DRAFTLINE_LANES == 16 && defined(__AVX512F__)
  return (Vector)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#elif DRAFTLINE_LANES == 8 && defined(__FMA__)
  return (Vector)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#elif DRAFTLINE_LANES == 4 && defined(__ARM_NEON)
  return (Vector)vfmaq_f32((float32x4_t)z, (float32x4_t)x, (float32x4_t)y);
#else
  return x * y + z;
#endif
}

inline Vector fma(Vector x, float y, Vector z) { return fma(x, all(y), z); }

inline Vector exp_of(Vector x) {  // Cephes' polynomial
  x = x < -87.0f ? all(-87.0f) : x;
  x = x > 88.0f ? all(88.0f) : x;
  const Vector n = fma(x, 1.44269504088896341f, all(12582912.0f)) - 12582912.0f;
  const Vector r = fma(n, 2.12194440e-4f, fma(n, -0.693359375f, x));
  Vector y = fma(r, 1.9875691500e-4f, all(1.3981999507e-3f));
  y = fma(y, r, all(8.3334519073e-3f));
  y = fma(y, r, all(4.1665795894e-2f));
  y = fma(y, r, all(1.6666665459e-1f));
  y = fma(y, r, all(5.0000001201e-1f));
  y = fma(y, r * r, r) + 1.0f;
  const Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
  return y * (Vector)power;
}

inline Vector capped(Vector x, float cap) {  // cap * tanh(x / cap)
  const Vector twice = exp_of(x * (2.0f / cap));
  return cap - (2.0f * cap) / (twice + 1.0f);
}

namespace detail {

// Lane `lane` of the halves of groups of G lanes of two vectors, one behind the other.
template <int64_t G>
constexpr int half_of(int lane, bool upper) {
  constexpr int64_t H = G / 2, N = LANES / G;
  const int64_t group = lane / H;
  return (group < N ? 0 : LANES) + (group % N) * G + lane % H + (upper ? H : 0);
}

template <int64_t G, int... I>
inline Vector fold(Vector a, Vector b, std::integer_sequence<int, I...>) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, half_of<G>(I, false)...) +
         __builtin_shufflevector(a, b, half_of<G>(I, true)...);
#else
  return __builtin_shuffle(a, b, Ints{half_of<G>(I, false)...}) +
         __builtin_shuffle(a, b, Ints{half_of<G>(I, true)...});
#endif
}

template <int64_t G>
inline void fold_all(Vector* values) {
  if constexpr (G > 1) {
    for (int64_t i = 0; i < G / 2; ++i)
      values[i] = fold<G>(values[2 * i], values[2 * i + 1],
                          std::make_integer_sequence<int, LANES>{});
    fold_all<G / 2>(values);
  }
}

}  // namespace detail

// Lane i: the sum of the lanes of `values[i]`; lane j is added to lane j + LANES / 2, and so on.
inline Vector sums_of(Vector* values) {
  detail::fold_all<LANES>(values);
  return values[0];
}

// The sum of values[0], ..., values[LANES - 1], added in the order of `sums_of`. No template with
// `sum_of_lanes`: its argument would lose the type's alignment.
inline Vector sum_in_halves(const Vector* values) {
  Vector sums[LANES];
  for (int64_t i = 0; i < LANES; ++i) sums[i] = values[i];
  for (int64_t half = LANES / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) sums[i] += sums[i + half];
  return sums[0];
}

inline float sum_of_lanes(Vector value) {
  for (int64_t half = LANES / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) value[i] += value[i + half];
  return value[0];
}

}  // namespace draftline
