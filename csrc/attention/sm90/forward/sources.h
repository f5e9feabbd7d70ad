// Where the keys of a tile lie, or its values: the sequence's first ones in pages, the others in rows; either
// may be none.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "attention/sm90/forward/smem_plan.h"
#include "common/math.h"

namespace pallas_attn::attention::sm90 {

enum class Role { kKeys, kValues };

// A page id that cannot be right becomes this; one behind the sequence's end becomes num_pages, which the
// copy engine fills with zeros.
constexpr int kBadPage = -1;

template <Role kRole>
class Source {
 public:
  static constexpr bool kOfKeys = kRole == Role::kKeys;

  __device__ explicit Source(const ForwardParams& params)
      : params_(params), page_size_(params.block_tables == nullptr ? 1 : params.page_size) {}

  __device__ int dim() const { return kOfKeys ? params_.head_dim : params_.value_dim; }

  // The table's entry for a key that is in pages; what it holds is not looked at.
  __device__ __forceinline__ int entry_of(const Tile& tile, int key) const {
    return __ldg(params_.block_tables + static_cast<int64_t>(tile.seq) * params_.max_pages +
                 page_size_.into(key));
  }
  __device__ __forceinline__ int checked(int page) const {
    return page < 0 || page >= params_.num_pages ? kBadPage : page;
  }
  __device__ __forceinline__ int page_of(const Tile& tile, int key) const {
    return key >= tile.k_len ? params_.num_pages : checked(entry_of(tile, key));
  }
  __device__ __forceinline__ int in_page(int key) const { return key - page_size_.into(key) * params_.page_size; }
  static __device__ __forceinline__ int row_of(const Tile& tile, int key) {
    return tile.k_begin + key - tile.in_pages;
  }

  // Elements of a key: of a page that exists, or of a row.
  __device__ __forceinline__ const char* of_page(const Tile& tile, int page, int key, int element_bytes) const {
    const Strides& strides = kOfKeys ? params_.key_strides : params_.value_strides;
    const auto* pool = static_cast<const char*>(kOfKeys ? params_.key : params_.value);
    return pool + (page * strides.batch + in_page(key) * strides.token + tile.kv_head * strides.head) *
                      element_bytes;
  }
  __device__ __forceinline__ const char* of_row(const Tile& tile, int key) const {
    const Strides& strides = kOfKeys ? params_.new_key_strides : params_.new_value_strides;
    const auto* rows = static_cast<const uint16_t*>(kOfKeys ? params_.new_key : params_.new_value);
    return reinterpret_cast<const char*>(rows + row_of(tile, key) * strides.token +
                                         tile.kv_head * strides.head);
  }

 private:
  const ForwardParams& params_;
  const Divisor page_size_;
};

}  // namespace pallas_attn::attention::sm90
