// A warp that has the keys of one tile after the other fetched by the copy engine, or the values, where a
// list names blocks of them.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "attention/sm90/forward/filling.h"
#include "attention/sm90/forward/maps.h"
#include "attention/sm90/forward/smem_plan.h"
#include "ptx/mbarrier.h"
#include "ptx/tma.h"

namespace pallas_attn::attention::sm90 {

template <typename Shape, Role kRole>
class ListLoader {
 public:
  using Plan = SmemPlan<Shape>;
  static constexpr bool kOfKeys = kRole == Role::kKeys;
  static constexpr int kPieces = kOfKeys ? Shape::kPieces : Shape::kValuePieces;
  static constexpr int kKeys = Shape::kKeys;

  __device__ ListLoader(const ForwardParams& params, const Maps& maps, const Boxes& boxes, Plan& smem,
                        int lane)
      : params_(params),
        map_(kOfKeys ? maps.key : maps.value),
        box_rows_(boxes.rows),
        filling_(smem),
        lane_(lane) {}

  // Each lane has a box, which lies in one block.
  __device__ void load(const ListedTile& tile) {
    const int boxes = kKeys / box_rows_;
    const bool copies = lane_ < boxes;
    const int own = lane_ * box_rows_;
    const int head = tile.kv_head / params_.lists.share;
    int key = (tile.num_keys - 1) * kKeys + own;
    int token = copies ? token_of(tile, key) : 0;
#pragma unroll 1
    for (int i = 0; i < tile.num_keys; ++i, key -= kKeys) {
      const int next = copies && key >= kKeys ? token_of(tile, key - kKeys) : 0;
      filling_.wait_until_empty();
      if (copies) {
        for (int piece = 0; piece < kPieces; ++piece) {
          ptx::tma_load_4d(filling_.buffer().row_of(piece, own), &map_, filling_.full(), piece * kPieceDims,
                           head, token, tile.batch);
        }
      }
      if (lane_ == 0) ptx::mbarrier_arrive_expect_bytes(filling_.full(), kPieces * kKeys * kRowBytes);
      __syncwarp();
      filling_.advance();
      token = next;
    }
  }

 private:
  // Of the batch's. Behind the list's last block, and of blocks that are not there, none is, which reads as
  // zero.
  __device__ __forceinline__ int token_of(const ListedTile& tile, int key) const {
    const KeyLists& lists = params_.lists;
    const int entry = key >> lists.k_shift;
    if (entry >= tile.num_blocks) return params_.kv_len;
    const int64_t token = (int64_t{__ldg(tile.blocks + entry) & kBlockBits} << lists.k_shift) + tile.k_begin +
                          (key & ((1 << lists.k_shift) - 1));
    return token < 0 || token > params_.kv_len ? params_.kv_len : static_cast<int>(token);
  }

  const ForwardParams& params_;
  const CUtensorMap& map_;
  const int box_rows_;
  Filling<Shape, kRole> filling_;
  const int lane_;
};

}  // namespace pallas_attn::attention::sm90
