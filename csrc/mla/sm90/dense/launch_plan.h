// How one call of the dense Hopper kernel is launched, decided from the call and from what the device offers.
// Plain C++: no GPU and none of CUDA's headers are needed to build or to test it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/tensor_tile.h"
#include "mla/merging.h"
#include "mla/params.h"

namespace pallas_attn::mla::sm90 {

// What the kernel was compiled for.
struct KernelShape {
  int tile_rows;   // query rows of a CTA
  int store_rows;  // of them, those of one warp, which stores them by itself
  int piece_dims;  // columns that the copy engine moves at once
  int threads;
  size_t shared_bytes;
  int most_cut_requests;  // that it can merge by itself
};

// What the current context offers to this kernel.
struct DeviceFacts {
  int num_sms;
  int blocks_per_sm;  // as the occupancy API counts them
};

struct LaunchPlan {
  struct Grid {
    int row_tiles, parts, kv_heads;
    int64_t blocks() const { return int64_t{row_tiles} * parts * kv_heads; }
  };

  Grid grid;
  int threads;
  size_t shared_bytes;
  Merging merging;
  TensorTile<3> query, latent_cache, out;

  // The CTAs wait for each other, so all of them must run at once.
  bool cooperative() const { return merging == Merging::kInside; }
};

LaunchPlan plan_launch(const DecodeParams& params, const KernelShape& kernel, const DeviceFacts& device);

}  // namespace pallas_attn::mla::sm90
