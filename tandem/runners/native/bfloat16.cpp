// Models with bfloat16 activations, compiled apart.
#include "transformer.h"

namespace tandem {

Model* bfloat16_model(Pool& pool, const Shape& shape, const void* embedding) {
    return new Transformer<Bfloat16>(pool, shape, embedding);
}

}  // namespace tandem
