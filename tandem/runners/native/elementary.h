// exp, log and a float64 sum with the bits of tandem/speculation/elementary.py: the same IEEE operations, in vectors or
// alone. Needs -ffp-contract=off (build.py).
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace tandem {

constexpr int SUMS = 64;  // lanes of a sum
#if defined(__AVX512F__)
constexpr int DOUBLES = 8;  // as wide as a register: comparisons of wider vectors are compiled number by number
#elif defined(__AVX2__)
constexpr int DOUBLES = 4;
#else
constexpr int DOUBLES = 2;
#endif
typedef double vd __attribute__((vector_size(8 * DOUBLES)));
typedef int64_t vl __attribute__((vector_size(8 * DOUBLES)));

// e^x: 0 below -708, and constant above 709.
inline vd exp_of(vd x) {
    const vd magic = vd{} + 0x1.8p52, least = vd{} - 709.0, most = vd{} + 709.0;
    vd held = x > least ? x : least;
    held = held < most ? held : most;
    const vd shifted = held * 0x1.71547652b82fep+0 + magic, k = shifted - magic;
    const vd high = held - k * 0x1.62e42feep-1, low = k * 0x1.a39ef35793c76p-33;
    const vd r = high - low, z = r * r;
    const vd c = r - z * (0x1.555555555553ep-3 + z * (-0x1.6c16c16bebd93p-9 + z * (0x1.1566aaf25de2cp-14 + z * (-0x1.bbd41c5d26bf1p-20 + z * 0x1.6376972bea4d0p-25))));
    const vd power = 1.0 - ((low - r * c / (2.0 - c)) - high);
    const vl scaled = (vl)power + ((vl)shifted << 52);
    return (vd)(scaled & ~(x < vd{} - 708.0));
}
inline double exp_of(double x) { return exp_of(vd{} + x)[0]; }
template <int N> inline void exps_of(double (&values)[N]) {
    for (int i = 0; i < N; i += DOUBLES) {
        vd part;
        std::memcpy(&part, values + i, sizeof(part));
        part = exp_of(part);
        std::memcpy(values + i, &part, sizeof(part));
    }
}

// Natural logarithm of finite x >= 0, constant below 2^-1022.
inline double log_of(double x) {
    constexpr int64_t ONE = int64_t(0x3FF) << 52, ROOT_HALF = int64_t(0x3FE6A09E) << 32, FRACTION = (int64_t(1) << 52) - 1;
    x = x > 0x1p-1022 ? x : 0x1p-1022;
    int64_t bits;
    std::memcpy(&bits, &x, sizeof(x));
    bits += ONE - ROOT_HALF;
    const double k = double((bits >> 52) - 1023);
    bits = (bits & FRACTION) + ROOT_HALF;
    double f;
    std::memcpy(&f, &bits, sizeof(f));
    f -= 1.0;
    const double s = f / (2.0 + f), z = s * s, w = z * z;
    const double odd = z * (0x1.5555555555593p-1 + w * (0x1.2492494229359p-2 + w * (0x1.7466496cb03dep-3 + w * 0x1.2f112df3e5244p-3)));
    const double even = w * (0x1.999999997fa04p-2 + w * (0x1.c71c51d8e78afp-3 + w * 0x1.39a09d078c69fp-3));
    const double half = 0.5 * f * f;
    return k * 0x1.62e42feep-1 - ((half - (s * (half + (even + odd)) + k * 0x1.a39ef35793c76p-33)) - f);
}

}  // namespace tandem
