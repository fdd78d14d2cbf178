// One instruction multiplies 64 codes by 64 digits, where a product of floats takes 16 numbers and
// codes that are widened before. Sums of codes times digits are integers and exact. A chunk's three
// sums become one number in float32, and the chunks are added in their order. So a row's result is
// bitwise independent of the other rows.
#include "byte_dots.h"

#include <c10/util/Float8_e8m0fnu.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <bit>
#include <cmath>

namespace draftline {
namespace {

// Rows whose sums stay in the first-level cache.
constexpr int64_t ROWS = 64;
// Prefetch distance in a panel, in chunks.
constexpr int64_t AHEAD = 8;
constexpr int64_t CACHE_LINE = 64;
// Inputs of one lane, whose products are added in one instruction.
constexpr int64_t DEEP = 4;
// Dot products of a chunk.
constexpr int64_t DOTS = CHUNK / DEEP;
// Rough inputs of less are 0.
constexpr float LEAST_ROUGH = 0x1p-100f;
constexpr float NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();

// sums + codes . digits: unsigned bytes by signed ones, four a lane.
inline Ints add_dots(Ints sums, Ints codes, Ints digits) {
#if DRAFTLINE_LANES == 16 && defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, (__m512i)digits);
#else
  for (int shift = 0; shift < 32; shift += 8)
    sums += (codes >> shift & 255) * (digits << (24 - shift) >> 24);
  return sums;
#endif
}

// Scales in either of their types.
inline Vector load_scales(const float* from) { return load(from); }

inline Vector load_scales(const c10::Half* from) {
#if DRAFTLINE_LANES == 16 && defined(__AVX512F__)
  return (Vector)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
  Vector value;
  for (int64_t i = 0; i < LANES; ++i) value[i] = from[i];
  return value;
#endif
}

inline Vector load_scales(const c10::Float8_e8m0fnu* from) {
  return load_powers(reinterpret_cast<const uint8_t*>(from));
}

// What the bytes of `e2m1_steps` are more than the steps.
constexpr int32_t E2M1_ZERO = 12;

// Of each byte, a code of e2m1: its number in steps of a half, and `E2M1_ZERO` more.
inline Ints e2m1_steps(Ints codes) {
  constexpr uint8_t STEPS[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
#if DRAFTLINE_LANES == 16 && defined(__AVX512BW__)
  const __m128i steps = _mm_loadu_si128(reinterpret_cast<const __m128i*>(STEPS));
  return (Ints)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(steps), (__m512i)codes);
#else
  uint8_t bytes[sizeof(Ints)];
  std::memcpy(bytes, &codes, sizeof(bytes));
  for (uint8_t& byte : bytes) byte = STEPS[byte];
  std::memcpy(&codes, bytes, sizeof(bytes));
  return codes;
#endif
}

inline Ints all_lanes(int32_t value) { return Ints{} + value; }

Digits digits_of(const float* x, bool is_rough) {
  int32_t largest = 0;
  for (int64_t i = 0; i < CHUNK; ++i)
    largest = std::max(largest, std::bit_cast<int32_t>(x[i]) & 0x7fffffff);
  Digits found{};
  if (largest >= 0x7f800000) {
    found.step = found.sum = NOT_A_NUMBER;
    return found;
  }
  if (is_rough) {
    const float most = std::bit_cast<float>(largest);
    const float scale = most > LEAST_ROUGH ? 127 / most : 0.0f;
    for (int64_t i = 0; i < CHUNK; ++i) {
      const float scaled = x[i] * scale;
      const int32_t integer = static_cast<int32_t>(scaled + std::copysign(0.5f, scaled));
      found.digits[0][i] = static_cast<int8_t>(integer);
      found.low += integer;
    }
    found.step = most / 127;
    found.sum = static_cast<float>(found.low) * found.step;
    return found;
  }
  // The next power of two where the largest would exceed 0x7f7f7f, the most that the digits hold.
  const int32_t exponent = std::max((largest + 0x10101) >> 23, 23);
  found.step = std::bit_cast<float>((exponent - 22) << 23);
  const float scale = std::bit_cast<float>((276 - exponent) << 23);
  int32_t sum = 0, integers[CHUNK];
  for (int64_t i = 0; i < CHUNK; ++i) {
    const float scaled = x[i] * scale;
    integers[i] = static_cast<int32_t>(scaled + std::copysign(0.5f, scaled));
    sum += integers[i];
  }
  for (int digit = 0; digit < 3; ++digit) {
    // 128 more for each digit makes all of them unsigned; flipped sign bits take that back.
    for (int64_t i = 0; i < CHUNK; ++i)
      found.digits[digit][i] = static_cast<int8_t>((integers[i] + 0x808080) >> 8 * digit ^ 0x80);
  }
  found.high = sum >> 8;
  found.low = sum & 255;
  found.sum = static_cast<float>(sum) * found.step;
  return found;
}

// The codes of a chunk of a panel, four inputs a lane: [DOTS, 2] vectors. Of 4 bits, those of the
// second vector are the high ones.
template <Kind K>
[[gnu::always_inline]] inline void take_codes(const uint8_t* from, Ints (*codes)[2]) {
  const Ints* next = reinterpret_cast<const Ints*>(from);
  for (int64_t dot = 0; dot < DOTS; ++dot) {
    if constexpr (K == Kind::DOT8) {
      codes[dot][0] = *next++;
      codes[dot][1] = *next++;
    } else {
      codes[dot][0] = *next & 0x0f0f0f0f;
      codes[dot][1] = *next++ >> 4 & 0x0f0f0f0f;
    }
    if constexpr (K == Kind::DOT_E2M1)
      for (int v = 0; v < 2; ++v) codes[dot][v] = e2m1_steps(codes[dot][v]);
  }
}

// `Scale`: of scales and minima; `DIGITS`: of the inputs, 3 or 1.
template <Kind K, typename Scale, int DIGITS>
void multiply_rows(const Part& p, int64_t panel, int64_t first, int64_t rows) {
  constexpr int64_t BYTES = chunk_bytes(K);
  const int64_t chunks = chunks_of(p.inputs), column = panel * DOT_COLUMNS;
  const int64_t width = std::min(DOT_COLUMNS, p.outputs - column);
  const int64_t offset = panel * p.weight.num_groups * DOT_COLUMNS;
  const uint8_t* bytes = p.weight.codes + panel * chunks * BYTES;
  const Scale* scales = static_cast<const Scale*>(p.weight.scales) + offset;
  const Scale* minima = static_cast<const Scale*>(p.weight.minima);
  if (minima) minima += offset;
  const uint8_t* zeros = p.weight.zeros ? p.weight.zeros + offset : nullptr;
  // What all codes are less, as integers.
  const int32_t zero = K == Kind::DOT_E2M1 ? E2M1_ZERO : K == Kind::DOT8 ? 128 : minima ? 0 : 8;
  const bool has_minima = minima || zeros;
  Vector sums[ROWS][2];
  for (int64_t r = 0; r < rows; ++r)
    for (int v = 0; v < 2; ++v)
      if (const int64_t left = width - v * LANES; p.bias && left > 0)
        sums[r][v] = load_some(p.bias + column + v * LANES, left);
      else
        sums[r][v] = Vector{};
  for (int64_t chunk = 0; chunk < chunks; ++chunk, bytes += BYTES) {
    for (int64_t i = 0; i < BYTES; i += CACHE_LINE)
      __builtin_prefetch(bytes + AHEAD * BYTES + i);
    Ints codes[DOTS][2];
    take_codes<K>(bytes, codes);
    const int64_t group = p.weight.groups[chunk] * DOT_COLUMNS;
    Vector scale[2], minimum[2] = {};
    for (int v = 0; v < 2; ++v) {
      const int64_t lane = group + v * LANES;
      scale[v] = load_scales(scales + lane);
      if (K == Kind::DOT_E2M1) scale[v] *= 0.5f;
      if (minima)
        minimum[v] = load_scales(minima + lane);
      else if (zeros)
        minimum[v] = __builtin_convertvector(zero - load_bytes(zeros + lane), Vector) * scale[v];
    }
    const Digits* x = p.digits + chunk * p.rows + first;
    for (int64_t r = 0; r < rows; ++r, ++x) {
      const Ints high = all_lanes(-zero * x->high), low = all_lanes(-zero * x->low);
      Ints dots[3][2] = {{low, low}, {high, high}, {}};
      for (int64_t dot = 0; dot < DOTS; ++dot)
        for (int digit = 0; digit < DIGITS; ++digit) {
          int32_t four;
          std::memcpy(&four, x->digits[digit] + dot * DEEP, DEEP);
          for (int v = 0; v < 2; ++v)
            dots[digit][v] = add_dots(dots[digit][v], codes[dot][v], all_lanes(four));
        }
      for (int v = 0; v < 2; ++v) {
        Vector whole = __builtin_convertvector(dots[0][v], Vector);
        if constexpr (DIGITS == 3)
          whole = fma(__builtin_convertvector((dots[2][v] << 8) + dots[1][v], Vector), 256.0f, whole);
        const Vector sum = fma(whole, scale[v] * x->step, sums[r][v]);
        sums[r][v] = has_minima ? fma(minimum[v], x->sum, sum) : sum;
      }
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t from = (first + r) * p.stride + column;
    for (int v = 0; v < 2; ++v) {
      const int64_t left = width - v * LANES;
      if (left <= 0) break;
      if (p.residual) sums[r][v] += load_some(p.residual + from + v * LANES, left);
      store_some(p.out + from + v * LANES, sums[r][v], left);
    }
  }
}

template <Kind K, int DIGITS>
auto* with_scales(Scales scales) {
  switch (scales) {
    case Scales::FLOAT16: return multiply_rows<K, c10::Half, DIGITS>;
    case Scales::E8M0: return multiply_rows<K, c10::Float8_e8m0fnu, DIGITS>;
    default: return multiply_rows<K, float, DIGITS>;
  }
}

template <Kind K>
auto* rows_of(const Part& part) {
  const Scales scales = part.weight.scale_type;
  return part.is_rough ? with_scales<K, 1>(scales) : with_scales<K, 3>(scales);
}

}  // namespace

void split_inputs(const float* x, int64_t rows, int64_t inputs, int64_t begin, int64_t end,
                  bool is_rough, Digits* to) {
  for (int64_t chunk = begin; chunk < end; ++chunk)
    for (int64_t row = 0; row < rows; ++row) {
      const float* from = x + row * inputs + chunk * CHUNK;
      float padded[CHUNK] = {};
      if (const int64_t left = inputs - chunk * CHUNK; left < CHUNK)
        from = static_cast<const float*>(std::memcpy(padded, from, left * sizeof(float)));
      to[chunk * rows + row] = digits_of(from, is_rough);
    }
}

void multiply_panel(const Part& part, int64_t panel) {
  const auto multiply = [&] {
    switch (part.weight.kind) {
      case Kind::DOT8: return rows_of<Kind::DOT8>(part);
      case Kind::DOT4: return rows_of<Kind::DOT4>(part);
      default: return rows_of<Kind::DOT_E2M1>(part);
    }
  }();
  for (int64_t first = 0; first < part.rows; first += ROWS)
    multiply(part, panel, first, std::min(ROWS, part.rows - first));
}

}  // namespace draftline
