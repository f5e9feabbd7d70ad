#pragma once

#include "device.h"

namespace pallas_attn {
inline namespace sm90 {

struct FourHalves {
  __half2 low, high;
};
inline FourHalves halves_of(uint32_t bytes) {
  __half v[4];
  for (int i = 0; i < 4; ++i) v[i] = __half(__nv_cvt_fp8_to_halfraw(bytes >> 8 * i & 255, __NV_E4M3));
  return {__half2(v[0], v[1]), __half2(v[2], v[3])};
}

}  // namespace sm90
}  // namespace pallas_attn
