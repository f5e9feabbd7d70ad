// Warps that make the query's own 16-bit numbers of keys in a cache of bytes, or of values: e4m3 and int8,
// which bf16 and fp16 hold exactly. Each thread has 16 bytes copied to a place of its own in shared memory, a
// batch of turns ahead, so that who waits for them is who asked.
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

// One of kHandWarps, each with rows of its own.
template <typename Element, typename Shape, Role kRole>
class Converter {
 public:
  using Plan = SmemPlan<Shape>;
  static constexpr bool kOfKeys = kRole == Role::kKeys;
  static constexpr int kPieces = kOfKeys ? Shape::kPieces : Shape::kValuePieces;
  static constexpr int kKeys = Shape::kKeys;

  // Who arrives when a buffer is full: lane 0 of each warp.
  static constexpr int kWriters = kHandWarps;

  __device__ Converter(const ForwardParams& params, const Maps& maps, Plan& smem, int warp, int lane)
      : source_(params),
        rows_map_(kOfKeys ? maps.new_key : maps.new_value),
        scales_(kOfKeys ? params.key_scale : params.value_scale),
        by_page_(kOfKeys ? params.key_scale_by_page : params.value_scale_by_page),
        filling_(smem),
        warp_(warp),
        lane_(lane),
        first_row_(warp * Turns::kRows),
        raw_(ptx::shared_address(raw_of(smem.raw).bytes[0]) + (warp * 32 + lane) * 16),
        row_scales_(raw_of(smem.raw).scales) {}

  __device__ void load(const Tile& tile) {
    int i = tile.first_key + tile.num_keys - 1;
    // Keys in rows are there as they should be.
    for (; i >= tile.first_key && i * kKeys >= tile.in_pages; --i) load_rows(tile, i * kKeys);
    if (i < tile.first_key) return;
    const Places places(source_, tile, 1, 0, 0);
    const float head_scale = by_page_ ? 1.0f : __ldg(scales_ + tile.kv_head);
    const bool scaled = by_page_ || source_.params.new_key != nullptr;
    int key = i * kKeys + first_row_, half = 0;
    const int last = tile.first_key * kKeys + first_row_;
    Held held(places, lane_);
    held.look_up(key);
    uint32_t next_bad = held.template settle<false>(key);
    held.look_up(key - kKeys);
    begin(held, tile, 0, half);
    ptx::close_copies();
#pragma unroll 1
    for (; key >= last; key -= kKeys) {
      const bool joins = tile.in_pages < key - first_row_ + kKeys;
      const uint32_t bad = next_bad;
#pragma unroll 1
      for (int batch = 0; batch < Turns::kBatches; ++batch) {
        const bool ends_tile = batch + 1 == Turns::kBatches;
        if (ends_tile && key > last) {
          next_bad = held.template settle<false>(key - kKeys);
          held.look_up(key - 2 * kKeys);
        }
        if (!ends_tile || key > last) begin(held, tile, ends_tile ? 0 : batch + 1, half ^ 1);
        ptx::close_copies();
        ptx::wait_for_copies_but<1>();
        __syncwarp();
        if (batch == 0) filling_.wait_until_empty();
        if (joins) {
          convert_or_copy(places, key, batch, half, scaled, head_scale);
        } else if (source_.params.cache == CacheType::kE4m3) {
          convert<true>(batch, half, scaled, head_scale);
        } else {
          convert<false>(batch, half, scaled, head_scale);
        }
        half ^= 1;
      }
      if (joins) ptx::wait_for_copies();
      if (kOfKeys && __any_sync(0xffffffff, bad != 0)) {
        __syncwarp();
        fill_with_nan(filling_.buffer(), first_row_, bad, lane_);
      }
      ptx::fence_async_shared();
      __syncwarp();
      if (lane_ == 0) ptx::mbarrier_arrive(filling_.full());
      filling_.advance();
    }
  }

 private:
  using Turns = TurnsOf<kKeys, kPieces>;
  using Held = HeldPlaces<kRole, Turns::kRows>;
  static constexpr uint32_t kTurnBytes = kHandWarps * 32 * 16;

  template <typename Raw>
  static __device__ auto& raw_of(Raw& raw) {
    if constexpr (kOfKeys) {
      return raw.keys;
    } else {
      return raw.values;
    }
  }

  // Of the warp's rows and their 16-byte chunks, those of one turn: a lane's.
  __device__ __forceinline__ int row_of(int turn) const {
    if constexpr (32 % Turns::kRowChunks == 0) {
      return turn * (32 / Turns::kRowChunks) + lane_ / Turns::kRowChunks;
    } else {
      return (turn * 32 + lane_) / Turns::kRowChunks;
    }
  }
  __device__ __forceinline__ int chunk_of(int turn) const {
    return (32 % Turns::kRowChunks == 0 ? lane_ : turn * 32 + lane_) % Turns::kRowChunks;
  }

  __device__ __forceinline__ void load_rows(const Tile& tile, int key) {
    filling_.wait_until_empty();
    if constexpr (kOfKeys) {
      for (int row = lane_; row < Turns::kRows; row += 32) filling_.scales()[first_row_ + row] = 1.0f;
      __syncwarp();
    }
    if (lane_ == 0) {
      if (warp_ == 0) {
        ptx::mbarrier_arrive_expect_bytes(filling_.full(), kPieces * kKeys * kRowBytes);
        for (int piece = 0; piece < kPieces; ++piece) {
          ptx::tma_load_4d(filling_.buffer()[piece], &rows_map_, filling_.full(), piece * kPieceDims,
                           tile.kv_head, source_.row_of(tile, key), tile.batch);
        }
      } else {
        ptx::mbarrier_arrive(filling_.full());
      }
    }
    __syncwarp();
    filling_.advance();
  }

  // Has a batch of the turns copied. Loops are short here, and not unrolled: each of these warps is alone
  // with its code, and what is not in the instruction cache takes five times as long.
  __device__ __forceinline__ void begin(const Held& held, const Tile& tile, int batch, int half) {
    uint32_t to = raw_ + half * Turns::kBatch * kTurnBytes;
    const int first = batch * Turns::kBatch;
#pragma unroll 4
    for (int turn = first; turn < first + Turns::kBatch; ++turn, to += kTurnBytes) {
      const int row = row_of(turn), chunk = chunk_of(turn);
      // The rows of a batch are a block's where they are 32.
      const char* from = Turns::kBatch == Turns::kRowChunks ? held.of(row, batch) : held.of(row);
      const bool copied = from != nullptr && chunk * 16 < source_.dim();
      ptx::copy_async(to, from + chunk * 16, copied);
    }
    if (!by_page_) return;
#pragma unroll 1
    for (int turn = first; turn < first + Turns::kBatch; ++turn) {
      const int row = row_of(turn), page = held.page_of(row);
      const bool copied = held.of(row) != nullptr;
      if (chunk_of(turn) == 0) {
        const auto scale = static_cast<int64_t>(copied ? page : 0) * source_.params.num_kv_heads;
        ptx::copy_word_async(ptx::shared_address(row_scales_ + first_row_ + row),
                             scales_ + scale + tile.kv_head);
      }
    }
  }

  // Where a lane's 32 bytes of a turn go, 16 at a time: neighbouring quads write halves in turns, so that
  // eight lanes meet all banks. `swapped`: the second half first.
  struct Place {
    int row;
    bool swapped;
    uint32_t first, other;

    __device__ __forceinline__ Place(uint32_t buffer, int to_row, int chunk) : row(to_row) {
      const int piece = chunk / 4;
      swapped = piece % 2;
      const uint32_t within = ((chunk % 4 * 2 + swapped) ^ (to_row & 7)) << 4;
      first = buffer + piece * (kKeys * kRowBytes) + to_row * kRowBytes + within;
      other = first ^ 16;
    }
  };

  template <bool kE4m3>
  static __device__ __forceinline__ uint4 to_elements(uint2 bytes) {
    return kE4m3 ? eight_of_e4m3<Element>(bytes.x, bytes.y) : eight_of_int8<Element>(bytes.x, bytes.y);
  }

  // The lane's 16 bytes of a turn, in the order in which they are stored.
  struct Raw {
    uint2 first, other;

    __device__ Raw() {}
    __device__ __forceinline__ Raw(uint32_t from, bool swapped)
        : first(ptx::load_shared_8_bytes(from + (swapped ? 8 : 0))),
          other(ptx::load_shared_8_bytes(from + (swapped ? 0 : 8))) {}
  };
  template <bool kE4m3>
  __device__ __forceinline__ void convert_turn(const Raw& raw, const Place& place, bool scaled, float scale) {
    uint4 first = to_elements<kE4m3>(raw.first), other = to_elements<kE4m3>(raw.other);
    if (!kOfKeys && scaled) {
      scale_eight<Element>(first, scale);
      scale_eight<Element>(other, scale);
    }
    ptx::store_16_bytes(place.first, first);
    ptx::store_16_bytes(place.other, other);
  }

  // A batch of the turns, some of which are loaded before the first is converted.
  template <bool kE4m3>
  __device__ __forceinline__ void convert(int batch, int half, bool scaled, float head_scale) {
    constexpr int kAtOnce = Turns::kBatch % 4 == 0 ? 4 : 2;
    uint32_t from = raw_ + half * Turns::kBatch * kTurnBytes;
    const uint32_t buffer = ptx::shared_address(filling_.buffer()[0]);
    const int first = batch * Turns::kBatch;
    const auto place_of = [&](int turn) { return Place(buffer, first_row_ + row_of(turn), chunk_of(turn)); };
#pragma unroll 1
    for (int turn = first; turn < first + Turns::kBatch; turn += kAtOnce, from += kAtOnce * kTurnBytes) {
      Raw raw[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) raw[k] = Raw(from + k * kTurnBytes, place_of(turn + k).swapped);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const Place place = place_of(turn + k);
        const float scale = !kOfKeys && by_page_ ? row_scales_[place.row] : head_scale;
        convert_turn<kE4m3>(raw[k], place, scaled, scale);
      }
    }
    if (kOfKeys && scaled) store_scales(batch, head_scale);
  }

  // What each key's score is multiplied by.
  __device__ __forceinline__ void store_scales(int batch, float head_scale) {
#pragma unroll 1
    for (int j = 0; j < Turns::kBatch; ++j) {
      const int turn = batch * Turns::kBatch + j, row = first_row_ + row_of(turn);
      if (chunk_of(turn) == 0) filling_.scales()[row] = by_page_ ? row_scales_[row] : head_scale;
    }
  }

  // The same where some of the tile's keys are in rows.
  __device__ __forceinline__ void convert_or_copy(const Places<kRole>& places, int key, int batch, int half,
                                                  bool scaled, float head_scale) {
    const uint32_t from = raw_ + half * Turns::kBatch * kTurnBytes;
    const uint32_t buffer = ptx::shared_address(filling_.buffer()[0]);
#pragma unroll 1
    for (int j = 0; j < Turns::kBatch; ++j) {
      const int turn = batch * Turns::kBatch + j, chunk = chunk_of(turn), at = key + row_of(turn);
      const Place place(buffer, first_row_ + row_of(turn), chunk);
      const bool in_row = places.holds(at) && !places.is_paged(at);
      const float scale = in_row ? 1.0f : by_page_ ? row_scales_[place.row] : head_scale;
      if (kOfKeys && scaled && chunk == 0) filling_.scales()[place.row] = scale;
      if (in_row) {
        const bool exists = chunk * 16 < source_.dim();
        const char* row_from = exists ? places.in_row(at) + chunk * 32 : places.anywhere();
        const int swapped = exists && place.swapped ? 16 : 0;
        ptx::copy_async(place.first, row_from + swapped, exists);
        ptx::copy_async(place.other, row_from + (exists ? 16 - swapped : 0), exists);
      } else if (source_.params.cache == CacheType::kE4m3) {
        convert_turn<true>(Raw(from + j * kTurnBytes, place.swapped), place, scaled, scale);
      } else {
        convert_turn<false>(Raw(from + j * kTurnBytes, place.swapped), place, scaled, scale);
      }
    }
  }

  const Source<kRole> source_;
  const CUtensorMap& rows_map_;
  const float* scales_;
  const bool by_page_;
  Filling<Shape, kRole> filling_;
  const int warp_, lane_, first_row_;
  const uint32_t raw_;
  float* row_scales_;
};

}  // namespace pallas_attn::attention::sm90
