// The C interface for ctypes. Nothing throws across. Errors are null or non-zero: int results are 0, a fault
// (below), or -1 without memory.
#include "model.h"
#include <algorithm>
#include <chrono>

namespace tandem {
namespace {

// Bounds of calls: each is checked before it reads or writes, so no token id, count or position escapes.

// A call's fault, or 0, plus FAULTS times the row at fault (named in library.py).
enum Fault { SOUND, SLOT, POSITION, TOKEN, ADAPTER, COUNT, ROOM, CALL, FAULTS = 16 };

bool within(int64_t value, int64_t end) { return value >= 0 && value < end; }

// Rows that fit a step, with up to counts[r] draft tokens (null: none) after row r, all but the last fed. Count 0 omits
// a row; `most` bounds counts. Each row has a token.
int fault_of(const Model& model, const Rows& rows, const int32_t* counts = nullptr, int most = 0) {
    const Shape& shape = model.shape;
    int64_t tokens = 0;
    for (int r = 0; r < rows.count; r++) {
        const int64_t count = counts ? counts[r] : 1, length = int64_t(rows.begins[r + 1]) - rows.begins[r];
        Fault fault = SOUND;
        if (counts && !within(count, int64_t(most) + 1)) fault = COUNT;
        else if (!count) continue;
        else if (length < 1 || (tokens += length) > shape.most_tokens) fault = ROOM;
        else if (!within(rows.slots[r], shape.slots)) fault = SLOT;
        else if (rows.quiet && !within(rows.quiet[r], length + 1)) fault = COUNT;
        else if (rows.starts[r] < 0 || rows.starts[r] + length + count - 1 > shape.length) fault = POSITION;
        else if (rows.adapters && rows.adapters[r] && !model.has_adapter(rows.adapters[r])) fault = ADAPTER;
        for (int i = rows.begins[r]; !fault && i < rows.begins[r + 1]; i++)
            if (!within(rows.tokens[i], shape.vocabulary)) fault = TOKEN;
        if (fault) return FAULTS * r + fault;
    }
    return SOUND;
}

// Sampling of rows (null: none). `outputs`: a token's logits, or 0 if they are of some tokens only.
int fault_of_draws(const Sampling* sampled, int rows, const float* logits, int outputs) {
    for (int r = 0; sampled && r < rows; r++)
        if (sampled[r].draws() && (!logits || !sampled[r].sound() || (outputs && sampled[r].tokens != outputs))) return FAULTS * r + CALL;
    return SOUND;
}

// Drafts of counts[r] <= `stride` tokens after each row, of ids only[...] (null: all).
int fault_of_drafts(const Model& draft, const Rows& tails, const int32_t* counts, int stride, const int32_t* only, const Drawing* drawing) {
    if (const int fault = fault_of(draft, tails, counts, stride)) return fault;
    if (drawing && drawing->least && !drawing->logits) return CALL;
    return drawing ? fault_of_draws(drawing->sampled, tails.count, drawing->logits, only ? 0 : draft.shape.outputs) : SOUND;
}

}  // namespace
}  // namespace tandem

using namespace tandem;

extern "C" {

const char* tandem_instructions() {
#if defined(__AVX512BF16__)
    return tiles_multiply_pairs() ? "amx_bf16" : "avx512_bf16";  // attention has the same bits in both
#elif defined(__AVX512F__)
    return "avx512";
#elif !defined(__FMA__) && !defined(__FP_FAST_FMAF)
    return "two roundings";  // of a product and its sum (see vectors.h): other bits in every data type
#elif defined(__AVX2__)
    return "avx2";
#else
    return "generic";
#endif
}

// Whether products of blocks and many tokens go through AMX tiles from now on, if this process can; returns a TileState.
int tandem_tiles(int use) { return use_tiles(use); }

void* tandem_pool(int threads) try { return new Pool(threads); } catch (...) { return nullptr; }
void tandem_pool_free(void* pool) { delete static_cast<Pool*>(pool); }

// `dtype`: 0 float32, 1 bfloat16.
void* tandem_model(void* pool, int dtype, const Shape* shape, const void* embedding) try {
    return (dtype ? bfloat16_model : float32_model)(*static_cast<Pool*>(pool), *shape, embedding);
} catch (...) { return nullptr; }
void tandem_model_free(void* model) { delete static_cast<Model*>(model); }

// Returns 1 without memory, 2 for different formats of neighbouring rows.
int tandem_set_layer(void* model, int layer, const LayerWeights* weights) try {
    if (!within(layer, static_cast<Model*>(model)->shape.layers)) return CALL;
    static_cast<Model*>(model)->set_layer(layer, *weights);
    return 0;
} catch (const std::invalid_argument&) { return 2; } catch (...) { return 1; }
int tandem_set_head(void* model, const void* norm, const Matrix* head) try {
    static_cast<Model*>(model)->set_head(norm, *head);
    return 0;
} catch (...) { return 1; }

// Makes a model of one layer an EAGLE-3 head, before its layer is set. Returns 1 without memory.
int tandem_read_features(void* model, const HeadInputs* inputs) try {
    static_cast<Model*>(model)->read_features(*inputs);
    return 0;
} catch (...) { return 1; }

// Steps write hidden states after `layers` to features [slots, length, count, hidden], in the model's dtype.
int tandem_hand_out(void* model, const int32_t* layers, int count, void* features) try {
    Model& from = *static_cast<Model*>(model);
    for (int i = 0; i < count; i++)
        if (!within(layers[i], from.shape.layers + 1)) return CALL;
    from.hand_out(layers, count, features);
    return SOUND;
} catch (...) { return -1; }

// Registers an adapter by number, then sets its layers. Returns 1 without memory.
int tandem_put_adapter(void* model, int number) try {
    if (number < 1) return CALL;
    static_cast<Model*>(model)->put_adapter(number);
    return 0;
} catch (...) { return 1; }
int tandem_set_adapter_layer(void* model, int number, int layer, const LayerAdapter* adapter) try {
    Model& to = *static_cast<Model*>(model);
    if (!to.has_adapter(number)) return ADAPTER;
    if (!within(layer, to.shape.layers)) return CALL;
    to.set_adapter_layer(number, layer, *adapter);
    return 0;
} catch (...) { return 1; }

int64_t tandem_weight_bytes(void* model) { return int64_t(static_cast<Model*>(model)->weight_bytes()); }

// A page: keys and values of 16 positions of all layers, and their features if handed out.
int64_t tandem_page_bytes(void* model) { return int64_t(static_cast<Model*>(model)->page_bytes()); }

// Copies blocks first .. first + count of a slot to `pages` of the `stored` pages at `store`, or `from` them.
int tandem_copy_pages(void* model, int slot, int first, int count, const int32_t* pages, char* store, int stored, int from) {
    Model& of = *static_cast<Model*>(model);
    if (!within(slot, of.shape.slots)) return SLOT;
    if (first < 0 || count < 0 || (int64_t(first) + count) * LANES > of.shape.length) return POSITION;
    for (int i = 0; i < count; i++)
        if (!within(pages[i], stored)) return ROOM;
    for (int i = 0; i < count; i++) of.copy_page(slot, first + i, store + pages[i] * of.page_bytes(), from);
    return SOUND;
}

// Bytes of keys and values of a slot's first `positions`; frees the memory beyond their pages.
int64_t tandem_slot_bytes(void* model, int positions) { return int64_t(static_cast<Model*>(model)->slots.taken(positions)); }
int tandem_give_back(void* model, int slot, int positions) {
    Model& of = *static_cast<Model*>(model);
    if (!within(slot, of.shape.slots)) return SLOT;
    if (positions < 0) return POSITION;
    of.slots.give_back(slot, std::min(positions, of.shape.length));
    return SOUND;
}

// Float32 weights [outputs, inputs] as rows of Q8_0 or Q4_1 blocks.
int tandem_encode(int format, int outputs, int inputs, const float* weights, uint8_t* to) {
    if ((format != Q8_0 && format != Q4_1) || outputs < 0 || inputs < 1) return CALL;
    const size_t bytes = row_bytes(Format(format), inputs);
    for (int row = 0; row < outputs; row++) encode(Format(format), inputs, weights + size_t(row) * inputs, to + row * bytes);
    return SOUND;
}

// `wants`: 0 nothing, 1 each row's last logits, 2 all; float32 [wanted, outputs].
int tandem_feed(void* model, const Rows* rows, int wants, float* logits) try {
    Model& to = *static_cast<Model*>(model);
    if (!within(wants, 3)) return CALL;
    if (const int fault = fault_of(to, *rows)) return fault;
    std::vector<Best> best;
    to.feed(*rows, wants, logits, best);
    return SOUND;
} catch (...) { return -1; }
int tandem_logprobs(void* pool, const float* const* logits, int rows, int count, int top, double* totals, int32_t* ids) try {
    if (rows < 0 || count < 1 || !within(top, int64_t(count) + 1)) return CALL;
    logprobs(*static_cast<Pool*>(pool), logits, rows, count, top, totals, ids);
    return SOUND;
} catch (...) { return -1; }
// Draws a token from logits of tokens only[0 .. outputs) (null: all); -1 if unsound.
int tandem_draw(void* pool, const float* logits, int outputs, const int32_t* only, const Sampling* by, int32_t* token) try {
    if (outputs < 1 || !by->draws() || fault_of_draws(by, 1, logits, only ? 0 : outputs)) return CALL;
    *token = draw(*static_cast<Pool*>(pool), logits, outputs, only, *by, 0);
    return SOUND;
} catch (...) { return -1; }
int tandem_propose(void* draft, const Rows* tails, int32_t* counts, const int32_t* only, int stride, int32_t* drafts, const Drawing* drawing) try {
    Model& from = *static_cast<Model*>(draft);
    if (const int fault = fault_of_drafts(from, *tails, counts, stride, only, drawing)) return fault;
    propose(from, *tails, counts, only, stride, drafts, drawing);
    return SOUND;
} catch (...) { return -1; }
int tandem_verify(void* target, const Rows* rows, const Sampling* sampled, int32_t* said, int32_t* accepted, float* logits) try {
    Model& by = *static_cast<Model*>(target);
    if (const int fault = fault_of(by, *rows)) return fault;
    if (const int fault = fault_of_draws(sampled, rows->count, logits, by.shape.outputs)) return fault;
    verify(by, *rows, sampled, said, accepted, logits);
    return SOUND;
} catch (...) { return -1; }

// Drafts and verifies. drafts[r * stride ...] has counts[r] tokens if given[r], else is filled; a draft ends before ids
// >= `known`. `said`, `logits`: as for verify. `adapters`, `sampled`: the verification's; the draft's are in `tails`
// and `drawing`.
int tandem_fused(void* draft, void* target, const Rows* tails, int32_t* counts, const int32_t* given, const int32_t* adapters, const int32_t* only, int known,
                 int stride, int32_t* drafts, const Sampling* sampled, int32_t* said, int32_t* accepted, float* logits, const Drawing* drawing,
                 double* draft_seconds) try {
    const auto started = std::chrono::steady_clock::now();
    Model &from = *static_cast<Model*>(draft), &by = *static_cast<Model*>(target);
    if (!within(known, by.shape.vocabulary + int64_t(1))) return CALL;
    std::vector<int32_t> asked(counts, counts + tails->count);
    for (int r = 0; r < tails->count; r++) {
        if (!within(counts[r], stride + int64_t(1))) return FAULTS * r + COUNT;
        const int64_t length = int64_t(tails->begins[r + 1]) - tails->begins[r];
        if (length < 1) return FAULTS * r + ROOM;
        if (!within(tails->starts[r] + length - 1, by.shape.length)) return FAULTS * r + POSITION;
        if (given[r]) asked[r] = 0;
    }
    if (const int fault = fault_of_drafts(from, *tails, asked.data(), stride, only, drawing)) return fault;
    if (const int fault = fault_of_draws(sampled, tails->count, logits, by.shape.outputs)) return fault;
    propose(from, *tails, asked.data(), only, stride, drafts, drawing);
    *draft_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
    const Rows call{tails->count, tails->slots, tails->starts, tails->begins, tails->tokens, adapters};
    Batch batch;
    for (int r = 0; r < call.count; r++) {
        if (!given[r]) counts[r] = asked[r];
        const int32_t *own = drafts + r * stride;
        const int end = call.begins[r + 1];
        counts[r] = int32_t(std::find_if(own, own + counts[r], [&](int32_t token) { return token >= known; }) - own);
        std::vector<int32_t> fed{call.tokens[end - 1]};
        fed.insert(fed.end(), own, own + counts[r]);
        batch.add(r, call, call.starts[r] + end - call.begins[r] - 1, fed.data(), fed.data() + fed.size());
    }
    const Rows rows = batch.rows(call);
    if (const int fault = fault_of(by, rows)) return fault;
    verify(by, rows, sampled, said, accepted, logits);
    return SOUND;
} catch (...) { return -1; }

#ifdef TANDEM_PHASES
const int64_t* tandem_spent() { return &spent[0][0][0]; }
#endif

}  // extern "C"
