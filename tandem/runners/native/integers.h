// Products of small integers, and the halves of floats that scale them. An integer sum is exact in any order, so every
// CPU has its own way here and all have the same result.
#pragma once
#include "vectors.h"
#if defined(__ARM_FEATURE_MATMUL_INT8)
#include <arm_neon.h>
#endif

namespace tandem {

constexpr int FOUR = 4;  // neighbouring inputs in a lane of 32 bits

// In each lane, adds the products of 4 unsigned bytes of `w` and the 4 signed bytes at `from`.
inline v16i multiply_add(v16i sum, v16u w, const int8_t* from) {
#if defined(__AVX512VNNI__)
    // As GCC would load each `from` into a register of its own, and spill those of other tokens for it.
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*reinterpret_cast<const int8_t(*)[FOUR]>(from)));
    return sum;
#elif defined(__AVX2__)
    // 16 bits are enough for a product, not for a sum of two with its sign: so in pairs, to 32 bits at once.
    const __m256i four = _mm256_set1_epi32(load<int32_t>(from)), bytes = _mm256_set1_epi32(0x00ff00ff);
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(four, 8), 8), odd = _mm256_srai_epi16(four, 8);
    __m256i halves[2], sums[2];
    std::memcpy(halves, &w, sizeof(w));
    std::memcpy(sums, &sum, sizeof(sum));
    for (int i = 0; i < 2; i++) {
        const __m256i low = _mm256_madd_epi16(_mm256_and_si256(halves[i], bytes), even);
        const __m256i high = _mm256_madd_epi16(_mm256_srli_epi16(halves[i], 8), odd);
        sums[i] = _mm256_add_epi32(sums[i], _mm256_add_epi32(low, high));
    }
    return load<v16i>(sums);
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    const int8x16_t four = vreinterpretq_s8_u32(vdupq_n_u32(load<uint32_t>(from)));
    uint8x16_t quarters[4];
    int32x4_t sums[4];
    std::memcpy(quarters, &w, sizeof(w));
    std::memcpy(sums, &sum, sizeof(sum));
    for (int i = 0; i < 4; i++) sums[i] = vusdotq_s32(sums[i], quarters[i], four);
    return load<v16i>(sums);
#else
    for (int i = 0; i < FOUR; i++) sum += (v16i)((w >> (8 * i)) & 255u) * int32_t(from[i]);
    return sum;
#endif
}

// float16 to float32, exactly.
inline v16f from_half(v16h value) {
#if defined(__AVX512F__)
    return (v16f)_mm512_cvtph_ps((__m256i)value);
#else
    const v16u bits = __builtin_convertvector(value, v16u), magnitude = (bits & 0x7fffu) << 13;
    const v16u special = (v16u)(magnitude >= 0x0f800000u) & 0x7f800000u;  // infinity and NaN
    const v16f scaled = (v16f)magnitude * 0x1p112f;
    return (v16f)((v16u)scaled | special | ((bits & 0x8000u) << 16));
#endif
}
inline float from_half(uint16_t value) { return from_half(v16h{} + value)[0]; }

// The nearest float16, the even one of two; NaN for what is too large.
inline uint16_t to_half(float value) {
    const uint32_t sign = load<uint32_t>(&value) >> 16 & 0x8000u;
    const float size = std::fabs(value), shifted = size + 0.5f, half = 0.5f;  // 0.5's last bit is worth the least float16
    const uint32_t bits = load<uint32_t>(&size), normal = ((bits + 0xfffu + (bits >> 13 & 1u)) >> 13) - (112u << 10);
    if (!(size < 65520.0f)) return 0x7e00u;
    return uint16_t(sign | (size < 0x1p-14f ? load<uint32_t>(&shifted) - load<uint32_t>(&half) : normal));
}

inline v16f floats(v16i value) { return __builtin_convertvector(value, v16f); }
inline v16f wide(const int8_t* bytes) { return __builtin_convertvector(load<v16b>(bytes), v16f); }
inline v16f wide(const uint8_t* bytes) { return __builtin_convertvector(load<v16c>(bytes), v16f); }

}  // namespace tandem
