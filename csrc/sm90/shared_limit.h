// What a CTA can have of a Hopper multiprocessor's shared memory.
#pragma once

#include <cstddef>

namespace pallas_attn {
inline namespace sm90 {

constexpr size_t kSmemLimit = 227 * 1024;

}  // namespace sm90
}  // namespace pallas_attn
