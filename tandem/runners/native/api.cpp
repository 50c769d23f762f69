// What Python calls, through ctypes: plain C. Errors are a null or non-zero result; nothing throws across.
#include "rounds.h"
#include <chrono>

using namespace tandem;

extern "C" {

int tandem_version() { return 1; }
const char* tandem_instructions() {
#if defined(__AVX512BF16__)
    return "avx512_bf16";
#elif defined(__AVX512F__)
    return "avx512";
#elif defined(__AVX2__)
    return "avx2";
#else
    return "generic";
#endif
}

void* tandem_pool(int threads) try { return new Pool(threads); } catch (...) { return nullptr; }
void tandem_pool_free(void* pool) { delete static_cast<Pool*>(pool); }

// `dtype`: 0 float32, 1 bfloat16.
void* tandem_model(void* pool, int dtype, const Shape* shape, const void* embedding, const float* cosines, const float* sines) try {
    Pool& threads = *static_cast<Pool*>(pool);
    if (dtype) return static_cast<Model*>(new Typed<Bfloat16>(threads, *shape, embedding, cosines, sines));
    return static_cast<Model*>(new Typed<Float32>(threads, *shape, embedding, cosines, sines));
} catch (...) { return nullptr; }
void tandem_model_free(void* model) { delete static_cast<Model*>(model); }

int tandem_set_layer(void* model, int layer, const LayerWeights* weights) try {
    static_cast<Model*>(model)->set_layer(layer, *weights);
    return 0;
} catch (...) { return 1; }
int tandem_set_head(void* model, const void* norm, const void* weights, const void* bias) try {
    static_cast<Model*>(model)->set_head(norm, weights, bias);
    return 0;
} catch (...) { return 1; }

// `wants`: 0 nothing, 1 the logits of each row's last token, 2 of all tokens; [wanted, outputs] float32.
void tandem_feed(void* model, const Rows* rows, int wants, float* logits) {
    std::vector<Best> best;
    static_cast<Model*>(model)->feed(*rows, wants, logits, best);
}
void tandem_propose(void* draft, const Rows* tails, int32_t* counts, const int32_t* only, int stride, int32_t* drafts) {
    propose(*static_cast<Model*>(draft), *tails, counts, only, stride, drafts);
}
void tandem_verify(void* target, const Rows* rows, int32_t* said, int32_t* accepted) {
    verify(*static_cast<Model*>(target), *rows, said, accepted);
}

// Draft and verification in one call. drafts[r * stride ...] holds counts[r] given tokens where given[r], else is filled.
// Draft tokens from `known` on are not the target's: a draft ends before the first. said[r * (stride + 1) ...].
void tandem_fused(void* draft, void* target, const Rows* tails, int32_t* counts, const int32_t* given, const int32_t* only, int known,
                  int stride, int32_t* drafts, int32_t* said, int32_t* accepted, double* draft_seconds) {
    auto started = std::chrono::steady_clock::now();
    std::vector<int32_t> asked(counts, counts + tails->count), slots, starts, begins{0}, tokens;
    for (int r = 0; r < tails->count; r++)
        if (given[r]) asked[r] = 0;
    propose(*static_cast<Model*>(draft), *tails, asked.data(), only, stride, drafts);
    *draft_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
    for (int r = 0; r < tails->count; r++) {
        if (!given[r]) counts[r] = asked[r];
        for (int i = 0; i < counts[r]; i++)
            if (drafts[r * stride + i] >= known) counts[r] = i;
        const int end = tails->begins[r + 1];
        slots.push_back(tails->slots[r]);
        starts.push_back(tails->starts[r] + end - tails->begins[r] - 1);
        tokens.push_back(tails->tokens[end - 1]);
        tokens.insert(tokens.end(), drafts + r * stride, drafts + r * stride + counts[r]);
        begins.push_back(int(tokens.size()));
    }
    std::vector<int32_t> all_said(tokens.size());
    verify(*static_cast<Model*>(target), {tails->count, slots.data(), starts.data(), begins.data(), tokens.data()}, all_said.data(), accepted);
    for (int r = 0; r < tails->count; r++)
        std::copy(&all_said[begins[r]], &all_said[begins[r]] + (begins[r + 1] - begins[r]), said + r * (stride + 1));
}

}  // extern "C"
