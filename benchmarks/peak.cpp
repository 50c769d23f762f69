// The most products of bytes a thread makes in a second: `vpdpbusd` on registers, twelve sums that do not wait for each other.
#include <immintrin.h>
#include <time.h>

extern "C" double peak() {
#ifdef __AVX512VNNI__
    constexpr int TIMES = 5000, SUMS = 12, PRODUCTS = 64;
    __m512i sums[SUMS] = {}, bytes = _mm512_set1_epi8(1);
    auto now = [] {
        timespec at;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &at);
        return double(at.tv_sec) + 1e-9 * double(at.tv_nsec);
    };
    const double began = now();
    for (int i = 0; i < TIMES; i++)
#pragma GCC unroll 12
        for (int s = 0; s < SUMS; s++) asm volatile("vpdpbusd %1, %1, %0" : "+v"(sums[s]) : "v"(bytes));
    return double(TIMES) * SUMS * PRODUCTS / (now() - began);
#else
    return 0;
#endif
}
