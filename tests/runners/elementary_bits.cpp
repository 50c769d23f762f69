// exp, log and a sum of elementary.h, to be called from a test that compiles this for one kind of CPU or another.
#include "elementary.h"

extern "C" void exps(const double* from, double* to, int count) {  // a multiple of 8
    for (int i = 0; i < count; i += tandem::DOUBLES) {
        tandem::vd x;
        std::memcpy(&x, from + i, sizeof(x));
        x = tandem::exp_of(x);
        std::memcpy(to + i, &x, sizeof(x));
    }
}
extern "C" void logs(const double* from, double* to, int count) {
    for (int i = 0; i < count; i++) to[i] = tandem::log_of(from[i]);
}
