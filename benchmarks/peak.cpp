// The most products of bytes a thread makes in a second, on registers, with sums that do not wait for each other: `vpdpbusd`
// with AVX-512 VNNI, `vpmaddubsw` and the addition that each needs with AVX2.
#include <time.h>
#if defined(__AVX2__)
#include <immintrin.h>

namespace {

#if defined(__AVX512VNNI__)
constexpr const char* NAME = "vpdpbusd";
constexpr int SUMS = 12;
typedef __m512i Register;
inline void add(Register& sum, Register bytes) { asm volatile("vpdpbusd %1, %1, %0" : "+v"(sum) : "v"(bytes)); }
#else
constexpr const char* NAME = "vpmaddubsw with vpaddw";
constexpr int SUMS = 7;
typedef __m256i Register;
inline void add(Register& sum, Register bytes) {
    Register products;
    asm volatile("vpmaddubsw %2, %2, %0\n\tvpaddw %0, %1, %1" : "=&x"(products), "+x"(sum) : "x"(bytes));
}
#endif

double seconds() {
    timespec at;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &at);
    return double(at.tv_sec) + 1e-9 * double(at.tv_nsec);
}

}  // namespace

extern "C" const char* instruction() { return NAME; }

extern "C" double peak() {
    constexpr int TIMES = 5000;
    Register sums[SUMS] = {}, bytes = {};
    const double began = seconds();
    for (int i = 0; i < TIMES; i++)
#pragma GCC unroll 12
        for (int s = 0; s < SUMS; s++) add(sums[s], bytes);
    return double(TIMES) * SUMS * sizeof(Register) / (seconds() - began);
}
#else
extern "C" const char* instruction() { return ""; }
extern "C" double peak() { return 0; }
#endif
