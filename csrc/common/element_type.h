// The 16-bit types that kernels have, for arguments that say which: without CUDA's headers.
#pragma once

namespace pallas_attn {

enum class ElementType { kBfloat16, kFloat16 };

}  // namespace pallas_attn
