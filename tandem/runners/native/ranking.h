// The tokens of one position in order of their logits, and the sum of the exponentials of their scores, with the bits of
// numpy's (tandem/speculation/draws.py, elementary.py): sums have one order, whoever of the threads adds.
#pragma once
#include "elementary.h"
#include "pool.h"
#include "vectors.h"
#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

namespace tandem {

typedef float narrow_vd __attribute__((vector_size(4 * DOUBLES)));  // as many floats

constexpr int STRIP = SUMS;  // logits whose largest is kept
constexpr int WORTH_SHARING = 4096;  // tokens

struct Candidate {
    double score;
    int32_t token;
    bool operator<(const Candidate& other) const { return score > other.score || (score == other.score && token < other.token); }
};

// Memory that is kept from draw to draw, because it is slow to come by. The calling thread's: it draws one token at a time.
struct Kept {
    std::vector<float> maxima, ordered, wide;
    std::vector<Candidate> candidates;
};
inline Kept& kept() {
    static thread_local Kept own;
    return own;
}

// Scores are logits / temperature, shifted so that the largest is 0.
class Ranking {
public:
    Ranking(Pool& pool, const float* logits, int count, double temperature) : pool_(pool), logits_(logits), count_(count), temperature_(temperature) {}

    double top() const { return top_; }
    const std::vector<Candidate>& candidates() const { return candidates_; }

    // The largest logit of each strip and of all; whether that is a number and nothing is NaN.
    bool find_largest() {
        maxima_.resize((count_ + STRIP - 1) / STRIP);
        vi nan{};
        float top = -INFINITY;
        for (int s = 0; s < strips(); s++) {
            float rest[STRIP];
            const float* from = strip(s, rest);
            vf most = load<vf>(from);
            nan |= most != most;
            for (int i = WIDTH; i < STRIP; i += WIDTH) {
                const vf next = load<vf>(from + i);
                nan |= next != next;
                most = next > most ? next : most;
            }
            maxima_[s] = largest(most);
            top = std::max(top, maxima_[s]);
        }
        for (int i = 0; i < WIDTH; i++)
            if (nan[i]) return false;
        top_ = top;
        return std::isfinite(top);
    }

    // The `k` largest scores, in order. At least k logits reach the k-th largest of the strips' maxima.
    void rank(int k) {
        double bound = -INFINITY;
        if (k < strips()) {
            ordered_ = maxima_;
            std::nth_element(ordered_.begin(), ordered_.begin() + k - 1, ordered_.end(), std::greater<float>());
            bound = ordered_[k - 1];
        }
        gather(bound);
        if (k < int(candidates_.size())) {
            std::nth_element(candidates_.begin(), candidates_.begin() + k, candidates_.end());
            candidates_.resize(k);
        }
        std::sort(candidates_.begin(), candidates_.end());
    }

    // Threads take lanes, eight at a time: each lane is a sum of its own.
    double mass_of_all() {
        double sums[SUMS];
        std::atomic<int> next{0};
        float rest[STRIP];
        const float* last = strip(strips() - 1, rest);
        shared([&] {
            for (int lane = 8 * next++; lane < SUMS; lane = 8 * next++) {
                vd own[8 / DOUBLES] = {};
                for (int s = 0; s < strips(); s++) {
                    const float* from = (s + 1 < strips() ? logits_ + s * STRIP : last) + lane;
                    for (int i = 0; i < 8 / DOUBLES; i++) {
                        const vd logits = __builtin_convertvector(load<narrow_vd>(from + i * DOUBLES), vd);
                        own[i] += exp_of((logits - top_) / temperature_);
                    }
                }
                std::memcpy(sums + lane, own, sizeof(own));
            }
        });
        return in_order(sums);
    }

protected:
    double score(float logit) const { return (double(logit) - top_) / temperature_; }
    int strips() const { return int(maxima_.size()); }
    int threads() const { return count_ < WORTH_SHARING ? 1 : pool_.count(); }

    // The logits of a strip; the last is filled up with -inf in `rest`.
    const float* strip(int s, float* rest) const {
        if ((s + 1) * STRIP <= count_) return logits_ + s * STRIP;
        std::fill(std::copy(logits_ + s * STRIP, logits_ + count_, rest), rest + STRIP, -INFINITY);
        return rest;
    }

    template <class Work> void shared(Work work) {
        pool_.run([](void* work_, int) { (*static_cast<Work*>(work_))(); }, &work, threads());
    }

    // Of tokens whose scores are at least that of `logit`, and of few others; those of equal scores may have smaller logits.
    void gather(double logit) {
        const double lost = (top_ - logit) * 0x1p-50 + temperature_ * 0x1p-1070;
        const float least = std::nextafter(float(std::max(logit - lost, -double(std::numeric_limits<float>::max()))), -INFINITY);
        candidates_.clear();
        for (int s = 0; s < strips(); s++)
            if (maxima_[s] >= least)
                for (int i = s * STRIP; i < std::min(count_, (s + 1) * STRIP); i++)
                    if (logits_[i] >= least) candidates_.push_back({score(logits_[i]), i});
    }

    static double in_order(const double* sums) {
        double total = 0;
        for (int i = 0; i < SUMS; i++) total += sums[i];
        return total;
    }

    Pool& pool_;
    const float* logits_;
    int count_;
    double temperature_, top_ = 0;
    std::vector<float>&maxima_ = kept().maxima, &ordered_ = kept().ordered;
    std::vector<Candidate>& candidates_ = kept().candidates;
};

}  // namespace tandem
