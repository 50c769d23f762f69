// Models whose activations are bfloat16. Each number format is compiled apart, beside the others.
#include "rounds.h"

namespace tandem {

Model* bfloat16_model(Pool& pool, const Shape& shape, const void* embedding) {
    return new Typed<Bfloat16>(pool, shape, embedding);
}

}  // namespace tandem
