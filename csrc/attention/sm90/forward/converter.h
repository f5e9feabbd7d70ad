// Warps that make the query's own 16-bit numbers of keys in a cache of bytes, or of values: e4m3 and int8,
// which bf16 and fp16 hold exactly. Bytes come in registers, a batch of turns ahead: through shared memory
// they would cross it twice more, beside operands of products, which fill half of its time.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "attention/sm90/forward/filling.h"
#include "attention/sm90/forward/maps.h"
#include "attention/sm90/forward/smem_plan.h"
#include "attention/sm90/forward/sources.h"
#include "ptx/async_copy.h"
#include "ptx/cache.h"
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
        scaled_(by_page_ || params.new_key != nullptr),
        filling_(smem),
        smem_(smem),
        warp_(warp),
        lane_(lane),
        first_row_(warp * Turns::kRows) {}

  __device__ void load(const Tile& tile) {
    int i = tile.first_key + tile.num_keys - 1;
    // Keys in rows are there as they should be.
    for (; i >= tile.first_key && i * kKeys >= tile.in_pages; --i) load_rows(tile, i * kKeys);
    if (i < tile.first_key) return;
    int key = i * kKeys + first_row_;
    const int last = tile.first_key * kKeys + first_row_;
    Held held(lane_);
    held.look_up(places_of(tile), key);
    find(held, tile, key);
    const char* const pool = pool_of(tile);
#pragma unroll
    for (int set = 0; set < Turns::kSets - 1; ++set) {
      fetch(raw_[set], held, pool, set * Turns::kBatchRows, true);
    }
#pragma unroll 1
    for (; key >= last; key -= kKeys) {
      const uint32_t bad = held.bad();
      filling_.wait_until_empty();
      if (kOfKeys && scaled_) tell_scales();
      convert_tile(held, tile, pool, key, last);
      if (tile.in_pages < key - first_row_ + kKeys) copy_rows(places_of(tile), key);
      if (__any_sync(0xffffffff, bad != 0)) {
        __syncwarp();
        fill_rows(filling_.buffer(), first_row_, bad, lane_, kOfKeys ? ~0u : 0u);
      }
      ptx::fence_async_shared();
      __syncwarp();
      if (lane_ == 0) ptx::mbarrier_arrive(filling_.full());
      filling_.advance();
    }
  }

 private:
  using Turns = TurnsOf<kKeys, kPieces>;
  using Held = HeldChunks<kRole, Turns::kRows>;
  using Raw = uint4[Turns::kBatch];

  __device__ __forceinline__ Places<kRole> places_of(const Tile& tile) const {
    return Places<kRole>(source_, tile, 1, 0, 0);
  }
  __device__ __forceinline__ const char* pool_of(const Tile& tile) const {
    return places_of(tile).anywhere() + byte_of(0, lane_);
  }
  // Where the keys from `key` on lie, that have been looked up, of which the next ones are.
  __device__ __forceinline__ void find(Held& held, const Tile& tile, int key) {
    const Places<kRole> places = places_of(tile);
    if (scaled_) store_scales(held, places, tile, key);
    held.settle(places, key);
    held.look_up(places, key - kKeys);
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
          ptx::tma_load_4d(filling_.buffer().row_of(piece, 0), &rows_map_, filling_.full(),
                           piece * kPieceDims, tile.kv_head, source_.row_of(tile, key), tile.batch);
        }
      } else {
        ptx::mbarrier_arrive(filling_.full());
      }
    }
    __syncwarp();
    filling_.advance();
  }

  // Of a batch, which rows and 16 bytes of them a lane has in a turn. Eight lanes have half of a piece's 128
  // bytes, of two rows: what they store then lies in all banks.
  static __device__ __forceinline__ int piece_of(int turn, int lane) {
    return (turn * 4 + lane / 8) % kPieces;
  }
  static __device__ __forceinline__ int row_of(int turn, int lane) {
    return (turn * 4 + lane / 8) / kPieces * 2 + lane % 8 / 4;
  }
  static __device__ __forceinline__ int byte_of(int turn, int lane) {
    return piece_of(turn, lane) * kPieceDims + lane % 4 * 16;
  }
  // Where these are stored, as elements: 16 bytes of 32, the others are where bit 4 differs.
  static __device__ __forceinline__ uint32_t place_of(int turn, int lane) {
    const int row = row_of(turn, lane);
    return piece_of(turn, lane) * (kKeys * kRowBytes) + row * kRowBytes + ((lane % 4 * 2 ^ (row & 7)) << 4);
  }
  // The same by that of the first turn, `begin`, in one instruction or none.
  static __device__ __forceinline__ uint32_t place_of(int turn, int lane, uint32_t to, uint32_t begin) {
    if constexpr (kPieces == 3) {
      return to + place_of(turn, lane);
    } else {
      constexpr int kTurnRows = 8 / kPieces;
      return (begin ^ (turn * kTurnRows & 7) << 4) + turn * kTurnRows * kRowBytes;
    }
  }

  // The batch whose rows begin with `first`: what is not there stays as it is, for nobody sees it. Elements
  // behind a head's last are never there, and zero from the beginning.
  __device__ __forceinline__ void fetch(Raw& raw, const Held& held, const char* pool, int first, bool any) {
#pragma unroll
    for (int turn = 0; turn < Turns::kBatch; ++turn) {
      const uint32_t chunk = held.of(first + row_of(turn, lane_), first / 32);
      const bool exists = any && chunk < kBadChunk && byte_of(turn, lane_) < source_.dim();
      const int ahead = byte_of(turn, lane_) - byte_of(0, lane_);
      ptx::load_16_bytes_if(raw[turn], pool + uint64_t{chunk} * 16 + ahead, exists);
    }
  }

  template <bool kE4m3, bool kScaled>
  __device__ __forceinline__ void convert(const Raw& raw, uint32_t to, const float* scales) {
    const uint32_t begin = to + place_of(0, lane_);
#pragma unroll
    for (int turn = 0; turn < Turns::kBatch; ++turn) {
      uint4 low = to_elements<kE4m3>(raw[turn].x, raw[turn].y);
      uint4 high = to_elements<kE4m3>(raw[turn].z, raw[turn].w);
      if (kScaled) {
        const float scale = scales[row_of(turn, lane_)];
        scale_eight<Element>(low, scale);
        scale_eight<Element>(high, scale);
      }
      const uint32_t place = place_of(turn, lane_, to, begin);
      ptx::store_16_bytes(place, low);
      ptx::store_16_bytes(place ^ 16, high);
    }
  }
  __device__ __forceinline__ void convert(const Raw& raw, uint32_t to, const float* scales) {
    const bool scaled = !kOfKeys && scaled_;
    if (source_.params.cache == CacheType::kE4m3) {
      scaled ? convert<true, true>(raw, to, scales) : convert<true, false>(raw, to, scales);
    } else {
      scaled ? convert<false, true>(raw, to, scales) : convert<false, false>(raw, to, scales);
    }
  }

  // While a batch is converted the next ones are on their way. The loop is short, and unrolled no further:
  // each of these warps is alone with its code, and what is not in the instruction cache takes five times as
  // long.
  __device__ __forceinline__ void convert_tile(Held& held, const Tile& tile, const char* pool, int key,
                                               int last) {
    constexpr int kStep = Turns::kBatchRows, kSets = Turns::kSets;
    uint32_t to = ptx::shared_address(filling_.buffer().row_of(0, first_row_));
    const float* scales = own_scales()[half_ ^ 1] + first_row_;
#pragma unroll 1
    for (int first = 0; first < Turns::kRows; first += kSets * kStep) {
      int next = first + (kSets - 1) * kStep;
      bool any = true;
#pragma unroll
      for (int set = 0; set < kSets; ++set, to += kStep * kRowBytes, scales += kStep, next += kStep) {
        if (set == 1 && next == Turns::kRows) {
          next = 0;
          any = key > last;
          if (any) find(held, tile, key - kKeys);
        }
        fetch(raw_[(set + kSets - 1) % kSets], held, pool, next, any);
        convert(raw_[set], to, scales);
      }
    }
  }

  template <bool kE4m3>
  static __device__ __forceinline__ uint4 to_elements(uint32_t low, uint32_t high) {
    return kE4m3 ? eight_of_e4m3<Element>(low, high) : eight_of_int8<Element>(low, high);
  }

  // What each of the warp's keys is multiplied by, or each value, where that differs: of those that have been
  // looked up, beside what the ones at work are.
  __device__ __forceinline__ void store_scales(const Held& held, const Places<kRole>& places,
                                               const Tile& tile, int key) {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < Held::kHeld; ++j) {
      const int row = j * 32 + lane_;
      if (row >= Turns::kRows) break;
      const int page = held.page(places, key + row, j);
      const int64_t of_page = by_page_ ? int64_t{page} * source_.params.num_kv_heads : 0;
      own_scales()[half_][first_row_ + row] = page < 0 ? 1.0f : __ldg(scales_ + of_page + tile.kv_head);
    }
    half_ ^= 1;
    __syncwarp();
  }
  __device__ __forceinline__ void tell_scales() {
    for (int row = lane_; row < Turns::kRows; row += 32) {
      filling_.scales()[first_row_ + row] = own_scales()[half_ ^ 1][first_row_ + row];
    }
  }
  __device__ __forceinline__ auto& own_scales() {
    if constexpr (kOfKeys) {
      return smem_.scales.next_keys;
    } else {
      return smem_.scales.values;
    }
  }

  // Of a tile of which some keys are in rows: those, over what was made of bytes that are not theirs.
  __device__ __forceinline__ void copy_rows(const Places<kRole>& places, int key) {
    constexpr int kChunks = kPieces * (kRowBytes / 16);
    __syncwarp();
    auto& buffer = filling_.buffer();
#pragma unroll 1
    for (int i = lane_; i < Turns::kRows * kChunks; i += 32) {
      const int row = i / kChunks, chunk = i % kChunks, to_row = first_row_ + row;
      if (places.is_paged(key + row) || !places.holds(key + row)) continue;
      const uint32_t to = buffer.chunk_of(chunk, to_row);
      const bool exists = chunk * 8 < source_.dim();
      ptx::copy_async(to, exists ? places.in_row(key + row) + chunk * 16 : places.anywhere(), exists);
    }
    ptx::wait_for_copies();
  }

  const Source<kRole> source_;
  const CUtensorMap& rows_map_;
  const float* scales_;
  const bool by_page_, scaled_;
  Filling<Shape, kRole> filling_;
  Plan& smem_;
  const int warp_, lane_, first_row_;
  int half_ = 0;  // of the scales that are stored next
  Raw raw_[Turns::kSets] = {};
};

}  // namespace pallas_attn::attention::sm90
