// A cache of bytes as it comes to shared memory: from the side that fills these buffers, and from the side
// that converts what is in them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention/sm90/forward/smem_plan.h"
#include "ptx/mbarrier.h"
#include "ptx/shared.h"
#include "sm90/ring.h"

namespace pallas_attn::attention::sm90 {

// Where a warp is with them: with those of keys, or of values.
template <typename Shape, Role kRole>
class RawPlace {
 public:
  using Plan = SmemPlan<Shape>;
  using Raw = decltype(Plan::raw);
  using Tiles = std::conditional_t<kRole == Role::kKeys, decltype(Raw::keys), decltype(Raw::values)>;

  __device__ explicit RawPlace(Plan& smem) : smem_(smem) {}

  __device__ Tiles& tiles() const {
    if constexpr (kRole == Role::kKeys) {
      return smem_.raw.keys;
    } else {
      return smem_.raw.values;
    }
  }
  __device__ int stage() const { return stage_; }
  __device__ uint32_t bytes() const { return ptx::shared_address(tiles().bytes[stage_]); }
  __device__ float* scales() const { return tiles().scales[stage_]; }
  __device__ uint64_t* full() const { return &tiles().ring.full[stage_][0]; }
  __device__ uint64_t* empty() const { return &tiles().ring.empty[stage_][0]; }
  __device__ void wait_until_full() const { ptx::mbarrier_wait(full(), phases_.full(stage_)); }
  __device__ void wait_until_empty() const { ptx::mbarrier_wait(empty(), phases_.empty(stage_)); }
  __device__ void advance() { sm90::advance(stage_, phases_); }

 private:
  Plan& smem_;
  Phases<Tiles::kStages> phases_;
  int stage_ = 0;
};

}  // namespace pallas_attn::attention::sm90
