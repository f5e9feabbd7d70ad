// Work items are sorted by how many key tiles they have, up to kExact of them to the tile, beyond that
// roughly: begun early they all are.
#pragma once

namespace pallas_attn::attention {

constexpr int kPrepareThreads = 1024;
constexpr int kBuckets = kPrepareThreads, kExact = 512, kRough = 16;

// The longest first.
__device__ __forceinline__ int bucket_of(int keys) {
  return kBuckets - 1 - (keys < kExact ? keys : min(kExact + (keys - kExact) / kRough, kBuckets - 1));
}
// The most keys that a bucket's tiles have, but for the first, which may have any number.
__device__ __forceinline__ int keys_of(int bucket) {
  const int rank = kBuckets - 1 - bucket;
  return rank < kExact ? rank : kExact + (rank - kExact + 1) * kRough - 1;
}

}  // namespace pallas_attn::attention
