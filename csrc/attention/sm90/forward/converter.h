// Warps that make the query's own 16-bit numbers of keys in a cache of bytes, or of values: e4m3 and int8,
// which bf16 and fp16 hold exactly. Each has rows of its own in all key tiles. Where pages are too short for
// the copy engine's boxes it has their bytes copied to shared memory by itself, some tiles ahead. Its loop is
// short: it is to stay in the instruction cache.
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
template <typename Element, typename Shape, Role kRole>
class Converter {
 public:
  using Plan = SmemPlan<Shape>;
  static constexpr bool kOfKeys = kRole == Role::kKeys;
  static constexpr int kPieces = kOfKeys ? Shape::kPieces : Shape::kValuePieces;
  static constexpr int kKeys = Shape::kKeys;

  __device__ Converter(const ForwardParams& params, const Maps& maps, const Boxes& boxes, Plan& smem,
                       int warp, int lane)
      : source_(params),
        rows_map_(kOfKeys ? maps.new_key : maps.new_value),
        scales_(kOfKeys ? params.key_scale : params.value_scale),
        by_page_(kOfKeys ? params.key_scale_by_page : params.value_scale_by_page),
        by_engine_(boxes.rows > 0),
        scaled_(by_page_ || params.new_key != nullptr),
        filling_(smem),
        smem_(smem),
        warp_(warp),
        lane_(lane),
        first_row_(warp * kRows) {}

  __device__ void load(const Tile& tile) {
    const int last = tile.first_key * kKeys;
    int key = last + (tile.num_keys - 1) * kKeys;
    // Keys in rows are there as they should be.
    for (; key >= last && key >= tile.in_pages; key -= kKeys) bring_rows(tile, key);
    if (key < last) return;
    entry_ = places_of(tile).entry_of(key + first_row_ + lane_ % kRows);
    constexpr int kAhead = Tiles::kStages * kKeys;
#pragma unroll 1
    for (int ahead = key; ahead >= last - kAhead; ahead -= kKeys) {
      if (ahead + kAhead <= key) convert_tile(tile, ahead + kAhead);
      fetch(tile, ahead, ahead >= last);
    }
  }

 private:
  using Raw = decltype(Plan::raw);
  using Tiles = std::conditional_t<kOfKeys, decltype(Raw::keys), decltype(Raw::values)>;
  static constexpr int kRawRowBytes = Tiles::kRawRowBytes;
  static constexpr int kRows = kKeys / kConverters;  // of a tile, a warp's
  // A lane has 16 bytes of a row in a turn. Four of these are on their way to it at a time.
  static constexpr int kBatchRows = kPieces == 1 ? 32 : kPieces == 2 ? 16 : 8;
  static constexpr int kBatch = kBatchRows * kPieces / 8;
  static_assert(kKeys % kConverters == 0 && kRows % kBatchRows == 0 && 32 % kRows == 0);

  __device__ __forceinline__ Places<kRole> places_of(const Tile& tile) const {
    return Places<kRole>(source_, tile, 1, 0, 0);
  }
  __device__ Tiles& tiles() {
    if constexpr (kOfKeys) {
      return smem_.raw.keys;
    } else {
      return smem_.raw.values;
    }
  }

  __device__ __forceinline__ void convert_tile(const Tile& tile, int key) {
    if (by_engine_) {
      ptx::mbarrier_wait(&tiles().ring.full[raw_stage_][0], raw_phases_.full(raw_stage_));
      raw_phases_.advance(raw_stage_);
    } else {
      ptx::wait_for_copies_but<Tiles::kStages - 1>();
    }
    __syncwarp();
    const bool multiplied = scaled_ && !kOfKeys;
    if (source_.params.cache == CacheType::kE4m3) {
      multiplied ? convert<true, true>() : convert<true, false>();
    } else {
      multiplied ? convert<false, true>() : convert<false, false>();
    }
    if (tile.in_pages < key + kKeys) copy_rows(tile, key);
    if constexpr (kOfKeys) {
      spoil_bad();
      if (scaled_) tell_scale(tiles().scales[raw_stage_][first_row_ + lane_ % kRows]);
    }
    ptx::fence_async_shared();
    __syncwarp();
    if (lane_ == 0) {
      ptx::mbarrier_arrive(filling_.full());
      if (by_engine_) ptx::mbarrier_arrive(&tiles().ring.empty[raw_stage_][0]);
    }
    filling_.advance();
  }

  // Has the bytes of a tile copied over those of the one that was converted last, where there is such a tile
  // and the copy engine does not. Lanes have looked up their own key's page, and look up the next tile's.
  __device__ __forceinline__ void fetch(const Tile& tile, int first_key, bool any) {
    const int key = first_key + first_row_ + lane_ % kRows;
    if (any && (kOfKeys || scaled_ || !by_engine_)) {
      const Places<kRole> places = places_of(tile);
      const bool is_paged = places.is_paged(key), is_bad = places.leads_nowhere(key, entry_);
      const bool exists = is_paged && !is_bad;
      if (kOfKeys) bad_ |= is_bad << raw_stage_;
      if (scaled_) store_scale(tile, exists);
      if (!by_engine_) copy(exists ? places.in_pool(key, entry_) : nullptr);
      entry_ = places.entry_of(key - kKeys);
    }
    if (!by_engine_) ptx::close_copies();
    raw_stage_ = (raw_stage_ + 1) % Tiles::kStages;
  }

  __device__ __forceinline__ void store_scale(const Tile& tile, bool exists) {
    if (lane_ >= kRows) return;
    const int64_t of_page = by_page_ ? int64_t{entry_} * source_.params.num_kv_heads : 0;
    tiles().scales[raw_stage_][first_row_ + lane_] = exists ? __ldg(scales_ + of_page + tile.kv_head) : 1.0f;
  }

  // The warp's rows, of which each lane knows where its own lies; null: nowhere.
  __device__ __forceinline__ void copy(const char* from) {
    constexpr int kChunks = kRawRowBytes / 16;
    const uint32_t to =
        ptx::shared_address(tiles().bytes[raw_stage_]) + first_row_ * kRawRowBytes + lane_ * 16;
#pragma unroll
    for (int i = 0; i < kRows * kChunks / 32; ++i) {
      const int row = (i * 32 + lane_) / kChunks, chunk = (i * 32 + lane_) % kChunks;
      const uint64_t row_from = __shfl_sync(0xffffffff, reinterpret_cast<uint64_t>(from), row);
      // Zeros where there is nothing, or an element behind a head's last.
      const bool copied = row_from != 0 && chunk * 16 < source_.dim();
      ptx::copy_async(to + i * 512, reinterpret_cast<const char*>(row_from) + chunk * 16, copied);
    }
  }

  // Which row of a batch a lane has in a turn, and which piece of it. Eight lanes have halves of a piece's
  // 128 bytes of two rows: what they store lies in all banks. So does what they load, where an even number of
  // pieces would have them meet but for the second row's other piece.
  static __device__ __forceinline__ int row_of(int turn, int lane) {
    return (turn * 4 + lane / 8) / kPieces * 2 + lane % 8 / 4;
  }
  static __device__ __forceinline__ int piece_of(int turn, int lane) {
    const int piece = (turn * 4 + lane / 8) % kPieces;
    return kPieces % 2 == 0 ? piece ^ lane % 8 / 4 : piece;
  }
  // Where that lies in bytes, and where it is stored: 16 bytes of 32, the others are where bit 4 differs.
  static __device__ __forceinline__ uint32_t raw_place_of(int turn, int lane) {
    return row_of(turn, lane) * kRawRowBytes + piece_of(turn, lane) * kPieceDims + lane % 4 * 16;
  }
  static __device__ __forceinline__ uint32_t place_of(int turn, int lane) {
    const int row = row_of(turn, lane);
    return piece_of(turn, lane) * (kKeys * kRowBytes) + row * kRowBytes + ((lane % 4 * 2 ^ (row & 7)) << 4);
  }
  // The same by those of the first turn, in one instruction or none. Rows of a turn are fewer than those
  // between turns, and have no bit of them.
  static constexpr bool kEvenTurns = kPieces != 3;
  static constexpr int kTurnRows = 8 / kPieces;
  static __device__ __forceinline__ uint32_t raw_place_of(int turn, int lane, uint32_t from, uint32_t begin) {
    return kEvenTurns ? begin + turn * kTurnRows * kRawRowBytes : from + raw_place_of(turn, lane);
  }
  static __device__ __forceinline__ uint32_t place_of(int turn, int lane, uint32_t to, uint32_t begin) {
    if (!kEvenTurns) return to + place_of(turn, lane);
    return (begin ^ (turn * kTurnRows & 7) << 4) + turn * kTurnRows * kRowBytes;
  }

  template <bool kE4m3, bool kScaled>
  __device__ __forceinline__ void convert() {
    uint32_t from = ptx::shared_address(tiles().bytes[raw_stage_]) + first_row_ * kRawRowBytes;
    uint32_t to = ptx::shared_address(filling_.buffer().row_of(0, first_row_));
    const float* scales = &tiles().scales[raw_stage_][first_row_];
#pragma unroll 1
    for (int done = 0; done < kRows; done += kBatchRows) {
      const uint32_t raw_begin = from + raw_place_of(0, lane_), begin = to + place_of(0, lane_);
      uint4 bytes[kBatch];
#pragma unroll
      for (int turn = 0; turn < kBatch; ++turn) {
        bytes[turn] = ptx::load_shared_16_bytes(raw_place_of(turn, lane_, from, raw_begin));
      }
      if (done == 0) filling_.wait_until_empty();
#pragma unroll
      for (int turn = 0; turn < kBatch; ++turn) {
        uint4 low = to_elements<kE4m3>(bytes[turn].x, bytes[turn].y);
        uint4 high = to_elements<kE4m3>(bytes[turn].z, bytes[turn].w);
        if (kScaled) {
          const float scale = scales[row_of(turn, lane_)];
          scale_eight<Element>(low, scale);
          scale_eight<Element>(high, scale);
        }
        const uint32_t place = place_of(turn, lane_, to, begin);
        ptx::store_16_bytes(place, low);
        ptx::store_16_bytes(place ^ 16, high);
      }
      from += kBatchRows * kRawRowBytes, to += kBatchRows * kRowBytes, scales += kBatchRows;
    }
  }
  template <bool kE4m3>
  static __device__ __forceinline__ uint4 to_elements(uint32_t low, uint32_t high) {
    return kE4m3 ? eight_of_e4m3<Element>(low, high) : eight_of_int8<Element>(low, high);
  }

  // NaN in place of keys of pages that are not there, of which the lane has one.
  __device__ __forceinline__ void spoil_bad() {
    const uint32_t is_bad = bad_ >> raw_stage_ & 1;
    if (!__any_sync(0xffffffff, is_bad != 0)) return;
    fill_rows(filling_.buffer(), first_row_, lane_ < kRows ? is_bad : 0, lane_, ~0u);
    bad_ &= ~(1u << raw_stage_);
  }

  // What the scores of a key are multiplied by, where that differs in a tile.
  __device__ __forceinline__ void tell_scale(float scale) {
    if (lane_ < kRows) smem_.raw.converted[filling_.stage()][first_row_ + lane_] = scale;
  }

  // Keys in rows are there as they should be.
  __device__ __forceinline__ void bring_rows(const Tile& tile, int key) {
    filling_.wait_until_empty();
    if constexpr (kOfKeys) tell_scale(1.0f);
    __syncwarp();
    if (lane_ == 0 && warp_ > 0) ptx::mbarrier_arrive(filling_.full());
    if (lane_ == 0 && warp_ == 0) {
      ptx::mbarrier_arrive_expect_bytes(filling_.full(), sizeof(filling_.buffer()));
      for (int piece = 0; piece < kPieces; ++piece) {
        ptx::tma_load_4d(filling_.buffer().row_of(piece, 0), &rows_map_, filling_.full(), piece * kPieceDims,
                         tile.kv_head, source_.row_of(tile, key), tile.batch);
      }
    }
    __syncwarp();
    filling_.advance();
  }

  // Of a tile of which some keys are in rows: those, over what was made of bytes that are not theirs.
  __device__ __forceinline__ void copy_rows(const Tile& tile, int key) {
    constexpr int kChunks = kPieces * (kRowBytes / 16);
    const Places<kRole> places = places_of(tile);
    __syncwarp();
#pragma unroll 1
    for (int i = lane_; i < kRows * kChunks; i += 32) {
      const int row = first_row_ + i / kChunks, chunk = i % kChunks;
      if (places.is_paged(key + row) || !places.holds(key + row)) continue;
      const bool exists = chunk * 8 < source_.dim();
      ptx::copy_async(filling_.buffer().chunk_of(chunk, row),
                      exists ? places.in_row(key + row) + chunk * 16 : places.anywhere(), exists);
    }
    ptx::wait_for_copies();
  }

  const Source<kRole> source_;
  const CUtensorMap& rows_map_;
  const float* scales_;
  const bool by_page_, by_engine_, scaled_;
  Filling<Shape, kRole> filling_;
  Plan& smem_;
  const int warp_, lane_, first_row_;
  Phases<Tiles::kStages> raw_phases_;
  int raw_stage_ = 0;
  int entry_;         // the table's, of a key
  uint32_t bad_ = 0;  // a bit a stage: whether the lane's own key is of a page that is not there
};

}  // namespace pallas_attn::attention::sm90
