// Warps that make the query's own 16-bit numbers of keys in a cache of bytes, and of values: e4m3 and int8,
// which bf16 and fp16 hold exactly. Each has the same rows of all tiles, and takes keys and values in turn,
// by the same code where they are alike: loops this short stay in the instruction cache.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "attention/sm90/forward/filling.h"
#include "attention/sm90/forward/maps.h"
#include "attention/sm90/forward/smem_plan.h"
#include "attention/sm90/forward/sources.h"
#include "ptx/async_copy.h"
#include "ptx/mbarrier.h"
#include "ptx/tma.h"
#include "sm90/from_bytes.h"

namespace pallas_attn::attention::sm90 {

// One of kConverters.
template <typename Element, typename Shape>
class Converter {
 public:
  using Plan = SmemPlan<Shape>;
  static constexpr int kKeys = Shape::kKeys, kStages = Shape::kKeyStages;
  static_assert(kStages == Shape::kValueStages && kKeys % kConverters == 0);

  // Who arrives when a buffer is full: lane 0 of each warp.
  static constexpr int kWriters = kConverters;

  __device__ Converter(const ForwardParams& params, const Maps& maps, Plan& smem, int warp, int lane)
      : params_(params),
        maps_(maps),
        apart_(params.new_key != nullptr),
        smem_(smem),
        warp_(warp),
        lane_(lane),
        first_row_(warp * kRows) {}

  __device__ void load(const Tile& tile) {
#pragma unroll 1
    for (int i = tile.first_key + tile.num_keys - 1; i >= tile.first_key; --i) {
      const int key = i * kKeys;
      if constexpr (Shape::kPieces == Shape::kValuePieces) {
#pragma unroll 1
        for (int half = 0; half < 2; ++half) fill<Shape::kPieces>(tile, key, half);
      } else {
        fill<Shape::kPieces>(tile, key, 0);
        fill<Shape::kValuePieces>(tile, key, 1);
      }
      advance(stage_, phases_);
    }
  }

 private:
  static constexpr int kRows = kKeys / kConverters;  // of a tile, a warp's
  static_assert(kRows % 8 == 0 && 32 % kRows == 0);

  // Keys of the tile from `key` on, or in the second half, values.
  template <int kPieces>
  __device__ __forceinline__ void fill(const Tile& tile, int key, int half) {
    auto& buffer = *static_cast<KeyTile<kKeys, kPieces, false>*>(
        half == 0 ? static_cast<void*>(&smem_.sK[stage_]) : static_cast<void*>(&smem_.sV[stage_]));
    auto& ring = half == 0 ? smem_.keys : smem_.values;
    uint64_t* const full = &ring.full[stage_][0];
    uint64_t* const empty = &ring.empty[stage_][0];
    if (__builtin_expect(key >= tile.in_pages, false)) {
      ptx::mbarrier_wait(empty, phases_.empty(stage_));
      bring_rows<kPieces>(tile, key, half, buffer, full);
      return;
    }
    uint64_t* const raw_empty = &smem_.raw.ring.empty[raw_stage_][0];
    ptx::mbarrier_wait(&smem_.raw.ring.full[raw_stage_][0], raw_phases_.full(raw_stage_));
    convert<kPieces>(buffer, half, empty);
    if (__builtin_expect(apart_ && tile.in_pages < key + kKeys, false)) {
      if (half == 0) copy_rows(Places(Source<Role::kKeys>(params_), tile, 1, 0, 0), buffer, key);
      if (half != 0) copy_rows(Places(Source<Role::kValues>(params_), tile, 1, 0, 0), buffer, key);
    }
    if (half == 0) finish_keys(buffer);
    ptx::fence_async_shared();
    __syncwarp();
    if (lane_ == 0) {
      ptx::mbarrier_arrive(full);
      ptx::mbarrier_arrive(raw_empty);
    }
    advance(raw_stage_, raw_phases_);
  }

  // Keys in rows are there as they should be.
  template <int kPieces>
  __device__ __forceinline__ void bring_rows(const Tile& tile, int key, int half,
                                             KeyTile<kKeys, kPieces, false>& buffer, uint64_t* full) {
    if (half == 0 && lane_ < kRows) smem_.raw.keys[stage_][first_row_ + lane_] = 1.0f;
    __syncwarp();
    if (lane_ != 0) return;
    if (warp_ > 0) {
      ptx::mbarrier_arrive(full);
      return;
    }
    ptx::mbarrier_arrive_expect_bytes(full, sizeof(buffer));
    const int row = Source<Role::kKeys>::row_of(tile, key);
    for (int piece = 0; piece < kPieces; ++piece) {
      ptx::tma_load_4d(buffer.row_of(piece, 0), half == 0 ? &maps_.new_key : &maps_.new_value, full,
                       piece * kPieceDims, tile.kv_head, row, tile.batch);
    }
  }

  // Which 16 bytes of which row a lane has of its warp's, in a turn. Eight lanes have halves of a piece's 128
  // bytes of two rows: what they store lies in all banks. So does what they load, where an even number of
  // pieces would have them meet but for the second row's other piece.
  template <int kPieces>
  static __device__ __forceinline__ int row_of(int turn, int lane) {
    return (turn * 4 + lane / 8) / kPieces * 2 + lane % 8 / 4;
  }
  template <int kPieces>
  static __device__ __forceinline__ int piece_of(int turn, int lane) {
    const int piece = (turn * 4 + lane / 8) % kPieces;
    return kPieces % 2 == 0 ? piece ^ lane % 8 / 4 : piece;
  }

  template <int kPieces>
  __device__ __forceinline__ void convert(KeyTile<kKeys, kPieces, false>& buffer, int half, uint64_t* empty) {
    constexpr int kTurns = kRows * kPieces / 8, kAtOnce = kTurns % 4 == 0 ? 4 : kTurns % 3 == 0 ? 3 : 2;
    static_assert(kTurns % kAtOnce == 0);
    const auto& raw = smem_.raw;
    const uint32_t from = ptx::shared_address(raw.bytes[raw_stage_]) + first_row_ * kPieces * kPieceDims;
    const uint32_t to = ptx::shared_address(buffer.row_of(0, first_row_));
    const float* const scales = raw.scales[raw_stage_] + first_row_;
    const bool scaled = half != 0 && (apart_ || params_.value_scale_by_page);
#pragma unroll
    for (int first = 0; first < kTurns; first += kAtOnce) {
      uint4 bytes[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = row_of<kPieces>(first + i, lane_), piece = piece_of<kPieces>(first + i, lane_);
        bytes[i] = ptx::load_shared_16_bytes(from + (row * kPieces + piece) * kPieceDims + lane_ % 4 * 16);
      }
      if (first == 0) ptx::mbarrier_wait(empty, phases_.empty(stage_));
      if (params_.cache == CacheType::kE4m3) {
        scaled ? store<true, true, kPieces>(bytes, first, to, scales)
               : store<true, false, kPieces>(bytes, first, to, scales);
      } else {
        scaled ? store<false, true, kPieces>(bytes, first, to, scales)
               : store<false, false, kPieces>(bytes, first, to, scales);
      }
    }
  }

  template <bool kE4m3, bool kScaled, int kPieces, int kAtOnce>
  __device__ __forceinline__ void store(const uint4 (&bytes)[kAtOnce], int first, uint32_t to,
                                        const float* scales) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = row_of<kPieces>(first + i, lane_), piece = piece_of<kPieces>(first + i, lane_);
      uint4 low = to_elements<kE4m3>(bytes[i].x, bytes[i].y);
      uint4 high = to_elements<kE4m3>(bytes[i].z, bytes[i].w);
      if (kScaled) {
        scale_eight<Element>(low, scales[row]);
        scale_eight<Element>(high, scales[row]);
      }
      const uint32_t place =
          to + piece * (kKeys * kRowBytes) + row * kRowBytes + ((lane_ % 4 * 2 ^ (row & 7)) << 4);
      ptx::store_16_bytes(place, low);
      ptx::store_16_bytes(place ^ 16, high);
    }
  }
  template <bool kE4m3>
  static __device__ __forceinline__ uint4 to_elements(uint32_t low, uint32_t high) {
    return kE4m3 ? eight_of_e4m3<Element>(low, high) : eight_of_int8<Element>(low, high);
  }

  // NaN in place of keys of pages that are not there; and what scores are multiplied by, where that differs.
  template <int kPieces>
  __device__ __forceinline__ void finish_keys(KeyTile<kKeys, kPieces, false>& buffer) {
    const auto& raw = smem_.raw;
    const uint32_t bad = raw.bad[raw_stage_][first_row_ / 32] >> first_row_ % 32;
    if (__builtin_expect((bad & ((1ull << kRows) - 1)) != 0, false)) {
      __syncwarp();
      fill_rows(buffer, first_row_, lane_ < kRows ? bad >> lane_ & 1 : 0, lane_, ~0u);
    }
    if (apart_ || params_.key_scale_by_page) {
      const int row = first_row_ + lane_;
      if (lane_ < kRows) smem_.raw.keys[stage_][row] = raw.scales[raw_stage_][row];
    }
  }

  // Of a tile of which some keys are in rows: those, over what was made of bytes that are not theirs.
  template <Role kRole, int kPieces>
  __device__ __forceinline__ void copy_rows(const Places<kRole>& places,
                                            KeyTile<kKeys, kPieces, false>& buffer, int key) {
    constexpr int kChunks = kPieces * (kRowBytes / 16);
    __syncwarp();
#pragma unroll 1
    for (int i = lane_; i < kRows * kChunks; i += 32) {
      const int row = first_row_ + i / kChunks, chunk = i % kChunks;
      if (places.is_paged(key + row) || !places.holds(key + row)) continue;
      const uint32_t to = buffer.chunk_of(chunk, row);
      const bool exists = chunk * 8 < places.dim();
      ptx::copy_async(to, exists ? places.in_row(key + row) + chunk * 16 : places.anywhere(), exists);
    }
    ptx::wait_for_copies();
  }

  const ForwardParams& params_;
  const Maps& maps_;
  const bool apart_;  // new keys are, in rows
  Plan& smem_;
  const int warp_, lane_, first_row_;
  Phases<kStages> phases_;
  Phases<Shape::kRawStages> raw_phases_;
  int stage_ = 0, raw_stage_ = 0;
};

}  // namespace pallas_attn::attention::sm90
