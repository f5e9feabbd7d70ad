// Where the keys of a tile lie, or its values: the sequence's first ones in pages, the others in rows; either
// may be none.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "attention/sm90/forward/smem_plan.h"
#include "common/math.h"

namespace pallas_attn::attention::sm90 {

// A page id that cannot be right becomes this; one behind the sequence's end becomes num_pages, which the
// copy engine fills with zeros.
constexpr int kBadPage = -1;

template <Role kRole>
struct Source {
  static constexpr bool kOfKeys = kRole == Role::kKeys;

  __device__ explicit Source(const ForwardParams& params)
      : params(params), page_size(params.block_tables == nullptr ? 1 : params.page_size) {}

  __device__ int dim() const { return kOfKeys ? params.head_dim : params.value_dim; }
  __device__ const Strides& strides() const { return kOfKeys ? params.key_strides : params.value_strides; }
  __device__ const Strides& row_strides() const {
    return kOfKeys ? params.new_key_strides : params.new_value_strides;
  }

  // The row of the table.
  __device__ const int* table_of(const Tile& tile) const {
    return params.block_tables + static_cast<int64_t>(tile.seq) * params.max_pages;
  }
  __device__ __forceinline__ int page_of(const Tile& tile, int key) const {
    if (key >= tile.k_len) return params.num_pages;
    const int page = __ldg(table_of(tile) + page_size.into(key));
    return page < 0 || page >= params.num_pages ? kBadPage : page;
  }
  // A key's place in its page, or among the rows.
  __device__ __forceinline__ int in_page(int key) const {
    return key - page_size.into(key) * params.page_size;
  }
  static __device__ __forceinline__ int row_of(const Tile& tile, int key) {
    return tile.k_begin + key - tile.in_pages;
  }

  const ForwardParams& params;
  const Divisor page_size;
};

// The same for threads that copy by themselves, 16 bytes of each key.
template <Role kRole>
class Places {
 public:
  // The bytes are as far into a key's elements; cached ones have `element_bytes`.
  __device__ Places(const Source<kRole>& source, const Tile& tile, int element_bytes, int offset,
                    int row_offset)
      : source_(source),
        table_(source.table_of(tile)),
        k_len_(tile.k_len),
        in_pages_(min(tile.in_pages, tile.k_len)) {
    const ForwardParams& params = source.params;
    const auto* pool = static_cast<const char*>(source.kOfKeys ? params.key : params.value);
    const Strides& strides = source.strides();
    pool_ = pool + tile.kv_head * strides.head * element_bytes + offset;
    page_bytes_ = static_cast<uint32_t>(strides.batch * element_bytes);
    token_bytes_ = static_cast<uint32_t>(strides.token * element_bytes);
    const auto* rows = static_cast<const uint16_t*>(source.kOfKeys ? params.new_key : params.new_value);
    if (rows != nullptr) {
      const Strides& row_strides = source.row_strides();
      rows += source.row_of(tile, 0) * row_strides.token + tile.kv_head * row_strides.head;
      rows_ = reinterpret_cast<const char*>(rows) + row_offset;
      row_bytes_ = static_cast<uint32_t>(row_strides.token * sizeof(uint16_t));
    }
  }

  __device__ __forceinline__ bool holds(int key) const { return key < k_len_; }
  // Also of a key before all others, which is not.
  __device__ __forceinline__ bool is_paged(int key) const {
    return static_cast<uint32_t>(key) < static_cast<uint32_t>(in_pages_);
  }

  // The table's entry for a key, if it is in pages.
  __device__ __forceinline__ int entry_of(int key) const {
    return is_paged(key) ? __ldg(table_ + source_.page_size.into(key)) : 0;
  }
  __device__ __forceinline__ bool leads_nowhere(int key, int page) const {
    return is_paged(key) && static_cast<uint32_t>(page) >= static_cast<uint32_t>(source_.params.num_pages);
  }
  // Of a key that is there, in a page that is.
  __device__ __forceinline__ const char* in_pool(int key, int page) const {
    return pool_ + static_cast<uint64_t>(static_cast<uint32_t>(page)) * page_bytes_ +
           static_cast<uint32_t>(source_.in_page(key)) * token_bytes_;
  }
  __device__ __forceinline__ const char* in_row(int key) const {
    return rows_ + static_cast<uint64_t>(static_cast<uint32_t>(key)) * row_bytes_;
  }
  __device__ __forceinline__ const char* address(int key, int page) const {
    return is_paged(key) ? in_pool(key, page) : in_row(key);
  }
  __device__ __forceinline__ const char* anywhere() const { return pool_; }

 private:
  const Source<kRole>& source_;
  const int* table_;
  const char* pool_;
  const char* rows_ = nullptr;
  uint32_t page_bytes_, token_bytes_, row_bytes_ = 0;
  int k_len_, in_pages_;
};

// Of what a lane holds for each block of 32 keys, in registers, which have no index.
template <typename T, int kBlocks>
__device__ __forceinline__ T of_block(const T (&all)[kBlocks], int block) {
  T one = all[0];
#pragma unroll
  for (int j = 1; j < kBlocks; ++j) {
    if (block == j) one = all[j];
  }
  return one;
}

// Where kRows neighbouring keys lie, those of a warp: each lane finds some of them, and all ask the lane that
// has. `places` are made anew each time, for they take registers.
template <Role kRole, int kRows>
class HeldPlaces {
 public:
  static constexpr int kHeld = (kRows + 31) / 32;

  __device__ explicit HeldPlaces(int lane) : lane_(lane) {}

  // What the table says of the keys from `first` on; on its way until it is asked for.
  __device__ __forceinline__ void look_up(const Places<kRole>& places, int first) {
#pragma unroll
    for (int j = 0; j < kHeld; ++j) entries_[j] = places.entry_of(first + j * 32 + lane_);
  }
  // Takes these for the keys that are copied next. Which of the lane's own, a bit each, lead to pages that
  // are not there.
  __device__ __forceinline__ uint32_t settle(const Places<kRole>& places, int first) {
    uint32_t bad = 0;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const int key = first + j * 32 + lane_;
      const bool leads_nowhere = places.leads_nowhere(key, entries_[j]);
      from_[j] = 0;
      if (places.holds(key) && !leads_nowhere) {
        from_[j] = reinterpret_cast<uint64_t>(places.address(key, entries_[j]));
      }
      if (leads_nowhere && j * 32 + lane_ < kRows) bad |= 1u << j;
    }
    return bad;
  }
  // Where one of the keys lies, by its number among them: null where there is nothing to copy. The warp asks
  // for some of a block of 32.
  __device__ __forceinline__ const char* of(int row, int block) const {
    return reinterpret_cast<const char*>(__shfl_sync(0xffffffff, of_block(from_, block), row & 31));
  }

 private:
  const int lane_;
  int entries_[kHeld];
  uint64_t from_[kHeld];
};

}  // namespace pallas_attn::attention::sm90
