// Every CTA finds by itself which sequences are taken and where their rows begin. Then each warp makes the
// rows of 16 tokens of a head at a time, whose pages its lanes look up while it is at work on those before.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention/rules.h"
#include "attention/widen/widen.h"
#include "common/block_team.h"
#include "common/math.h"
#include "ptx/cache.h"
#include "sm90/from_bytes.h"

namespace pallas_attn::attention {

constexpr int kWidenThreads = 256, kWidenWarps = kWidenThreads / 32;
constexpr int kWidenTokens = 16;  // of one warp at a time
// Loads of a lane that are on their way together, 8 bytes each: 16 are then written, so that a warp writes
// whole sectors.
constexpr int kWidenLoads = 8;

// Of a sequence that may be taken: the keys that its queries see, and pairs of tiles, of which no more count
// than are enough. Else none.
struct SeenKeys {
  int begin = 0, count = 0, pairs = 0;

  __device__ SeenKeys(const WidenParams& params, const Sequence& sequence, const Window& window) {
    if (sequence.bad || sequence.q_len * params.call.group < params.least_rows) return;
    begin = window.begin(sequence.offset);
    count = max(sequence.k_len - begin, 0);
    if (count > params.room) count = 0;
    const int64_t tiles = ceil_div(sequence.q_len * params.call.group, kWidenTile);
    pairs = static_cast<int>(min(tiles * ceil_div(count, kWidenTile), int64_t{params.least_pairs}));
  }
};

// Where a token's bytes lie: its page, and its place there.
struct Slot {
  int page, token;
};
constexpr int kPageOutside = -1, kNoToken = -2;  // in place of a page

template <typename Element, bool kE4m3>
class Widening {
  using Team = BlockTeam<kWidenThreads, false>;

 public:
  struct Scratch {
    Team::Scratch team;
    int pairs;
  };

  // first_row: room for a number more than there are sequences.
  __device__ Widening(const WidenParams& params, int* first_row)
      : params_(params),
        window_(params.call),
        num_seqs_(num_seqs_now(params.call)),
        room_(params.room),
        first_row_(first_row),
        page_size_(params.call.page_size),
        lane_(threadIdx.x % 32) {}

  __device__ void work(Scratch& scratch) {
    const Team team(scratch.team);
    if (threadIdx.x == 0) scratch.pairs = 0;
    int pairs = 0;
    const auto keys_of = [&](int seq) {
      const SeenKeys keys = seen(seq);
      pairs += keys.pairs;
      return keys.count;
    };
    const int all = team.prefix_sum(num_seqs_, keys_of, first_row_).sum;
    if (threadIdx.x == 0) first_row_[num_seqs_] = all;
    if (pairs > 0) atomicAdd(&scratch.pairs, pairs);
    __syncthreads();
    if (scratch.pairs < params_.least_pairs) room_ = 0;
    for (int seq = blockIdx.x * kWidenThreads + threadIdx.x; seq < params_.call.num_seqs;
         seq += gridDim.x * kWidenThreads) {
      tell(seq);
    }
    const int tokens = first_row_[last_up_to(first_row_, num_seqs_ + 1, room_)];
    const int heads = params_.call.num_kv_heads, units = ceil_div(tokens, kWidenTokens) * heads;
    const int step = gridDim.x * kWidenWarps;
    int unit = blockIdx.x * kWidenWarps + threadIdx.x / 32;
    const auto first_of = [&](int unit) { return unit / heads * kWidenTokens; };
    Slot found = find(first_of(unit), tokens);
#pragma unroll 1
    for (; unit < units; unit += step) {
      const Slot slot = checked(found);
      found = find(first_of(unit + step), tokens);
      const int head = unit % heads;
      const int64_t row = int64_t{head} * params_.room + first_of(unit);
      widen(params_.call.key, params_.call.key_strides, params_.call.head_dim, head, slot, ~0u, params_.key,
            row);
      widen(params_.call.value, params_.call.value_strides, params_.call.value_dim, head, slot, 0,
            params_.value, row);
    }
  }

 private:
  __device__ SeenKeys seen(int seq) const {
    return SeenKeys(params_, Sequence(params_.call, seq, num_seqs_), window_);
  }

  // Whether a sequence is taken, and where its tokens lie.
  __device__ void tell(int seq) const {
    int q_begin = 0, q_len = 0, k_begin = 0, k_len = 0;
    if (seq < num_seqs_ && first_row_[seq] < first_row_[seq + 1] && first_row_[seq + 1] <= room_) {
      const Sequence sequence(params_.call, seq, num_seqs_);
      q_begin = sequence.q_begin, q_len = sequence.q_len;
      k_begin = first_row_[seq], k_len = first_row_[seq + 1] - k_begin;
    }
    params_.taken[seq] = k_len > 0;
    tell_bounds(params_.q_bounds, seq, q_begin, q_len);
    tell_bounds(params_.k_bounds, seq, k_begin, k_len);
  }
  static __device__ void tell_bounds(int* bounds, int seq, int begin, int count) {
    bounds[seq * kDocumentStep] = begin;
    bounds[seq * kDocumentStep + 1] = begin + count;
    bounds[seq * kDocumentStep + 2] = 1;  // all tokens between are the sequence's
  }

  // Of the lane's token of those from row `first` on; what the table says is on its way until it is checked.
  __device__ Slot find(int first, int tokens) const {
    const int row = first + lane_ % kWidenTokens;
    if (row >= tokens) return {0, kNoToken};
    const int seq = last_up_to(first_row_, num_seqs_, row);
    const int key = seen(seq).begin + row - first_row_[seq], column = page_size_.into(key);
    const int* entry = params_.call.block_tables + int64_t{seq} * params_.call.max_pages + column;
    return {ptx::load_int(entry), key - column * params_.call.page_size};
  }
  __device__ Slot checked(const Slot& found) const {
    if (found.token == kNoToken) return {kNoToken, 0};
    const bool exists = found.page >= 0 && found.page < params_.call.num_pages;
    return {exists ? found.page : kPageOutside, found.token};
  }

  // Rows from `first_row` on: in 16 tokens of an even number of chunks a row, all lanes have as many. Of a
  // page outside the pool, `outside` is in their place.
  __device__ __forceinline__ void widen(const void* pool, const Strides& strides, int dim, int head,
                                        const Slot& slot, uint32_t outside, void* rows, int64_t first_row) {
    const int chunks = dim / 8, count = kWidenTokens * chunks;
    const auto* from = static_cast<const uint8_t*>(pool) + head * strides.head;
    auto* const to = reinterpret_cast<uint4*>(static_cast<uint16_t*>(rows) + first_row * dim);
    const Divisor by_chunks(chunks);
#pragma unroll 1
    for (int first = lane_; first < count; first += 32 * kWidenLoads) {
      int page[kWidenLoads];
      uint2 bytes[kWidenLoads];
#pragma unroll
      for (int i = 0; i < kWidenLoads; ++i) {
        const int chunk = first + 32 * i, token = by_chunks.into(chunk);
        page[i] = chunk < count ? __shfl_sync(~0u, slot.page, token) : kNoToken;
        const int in_page = __shfl_sync(~0u, slot.token, token);
        if (page[i] < 0) continue;
        bytes[i] = ptx::load_8_bytes(from + page[i] * strides.batch + in_page * strides.token +
                                     (chunk - token * chunks) * 8);
      }
#pragma unroll
      for (int i = 0; i < kWidenLoads; ++i) {
        if (page[i] == kNoToken) continue;
        const uint4 all_outside = make_uint4(outside, outside, outside, outside);
        to[first + 32 * i] = page[i] < 0 ? all_outside : to_elements(bytes[i]);
      }
    }
  }
  static __device__ __forceinline__ uint4 to_elements(uint2 bytes) {
    return kE4m3 ? eight_of_e4m3<Element>(bytes.x, bytes.y) : eight_of_int8<Element>(bytes.x, bytes.y);
  }

  const WidenParams& params_;
  const Window window_;
  const int num_seqs_;
  int room_;  // tokens that may be taken
  int* const first_row_;
  const Divisor page_size_;
  const int lane_;
};

}  // namespace pallas_attn::attention
