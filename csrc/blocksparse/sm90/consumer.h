// A math warpgroup: the 64 queries of its half of every tile against the key tiles that they see. The product
// with one key tile's values runs beside the softmax of the next one's scores.
#pragma once

#include "blocksparse/params.h"
#include "blocksparse/sm90/smem_plan.h"
#include "ptx/control.h"
#include "ptx/mbarrier.h"
#include "ptx/wgmma.h"
#include "sm90/online_softmax.h"
#include "sm90/ring.h"

namespace pallas_attn::blocksparse::sm90 {

constexpr int kKeySteps = kTileKeys / kStepDims;

// Barrier 0 is __syncthreads.
enum NamedBarrier {
  // Values behind the sequence's end are zeroed. Within one warpgroup.
  kTailCleared = 1,  // and 2
};

template <typename Element>
class Consumer {
 public:
  __device__ Consumer(const PrefillParams& params, SmemPlan& smem, int half, int thread)
      : params_(params),
        smem_(smem),
        half_(half),
        thread_(thread),
        at_(thread),
        scale_log2_(params.scale * kLog2E) {}

  __device__ void work() {
    int slot = 0;
    if (!open(slot)) return;
    issue_scores(slot);
    finish_scores<0>();
    begin(slot);
    float rescale[kRowsPerThread];
    exponentiate(rS_, scale_log2_, state_, rescale);
    pack_probabilities<Element>(rS_, rP_);
    while (true) {
      const int last = smem_.tiles[slot].num_keys - 1;
      for (int key = 0; key < last; ++key) {
        issue_scores(slot);
        issue_values(key);
        finish_scores<1>();
        exponentiate(rS_, scale_log2_, state_, rescale);
        finish_values();
        pack_probabilities<Element>(rS_, rP_);
        rescale_rows(rO_, rescale);
      }
      // A tile's last product runs beside the next one's first.
      const Place place = leave(slot);
      const int next = next_slot(slot);
      if (!open(next)) {
        issue_values(last);
        finish_values();
        store(place, state_);
        return;
      }
      issue_scores(next);
      issue_values(last);
      finish_scores<1>();
      const RowState before = state_;
      begin(next);
      exponentiate(rS_, scale_log2_, state_, rescale);
      finish_values();
      store(place, before);
      pack_probabilities<Element>(rS_, rP_);
      slot = next;
    }
  }

 private:
  // Waits for the slot's tile and its queries; false if there are no more.
  __device__ __forceinline__ bool open(int slot) {
    ptx::mbarrier_wait(&smem_.told.full[slot][0], tile_phases_.full(slot));
    if (smem_.tiles[slot].head < 0) return false;
    ptx::mbarrier_wait(&smem_.query_full[slot], tile_phases_.full(slot));
    tile_phases_.advance(slot);
    return true;
  }

  // With the scores of a tile's first key tile.
  __device__ __forceinline__ void begin(int slot) {
    state_.reset();
    own_keys_ = smem_.tiles[slot].own_keys;
    if (own_keys_ == 0) return;
    // A query sees the keys up to itself.
    const int first = half_ * kFragmentRows + 1;
    mask_scores(rS_, at_, 0, {first + at_.row(0), first + at_.row(1)});
  }

  __device__ __forceinline__ void issue_scores(int slot) {
    ptx::mbarrier_wait(&smem_.keys.full[key_stage_][0], key_phases_.full(key_stage_));
    const uint64_t query = ptx::wgmma_descriptor(smem_.half_of(slot, 0, half_), 0);
    const uint64_t key = ptx::wgmma_descriptor(smem_.sK[key_stage_], 0);
    ptx::wgmma_touch(rS_);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kHeadDim / kStepDims; ++step) {
      const uint32_t offset = step / kStepsPerPiece * kPieceBytes + step % kStepsPerPiece * kStepDims * 2;
      const uint64_t step_query = ptx::advance_descriptor(query, offset);
      ptx::wgmma_k16<Element, ptx::kKMajor>(rS_, step_query, ptx::advance_descriptor(key, offset), step > 0);
    }
    ptx::wgmma_commit();
  }

  // With the values of the tile's key tile `key`.
  __device__ __forceinline__ void issue_values(int key) {
    ptx::mbarrier_wait(&smem_.values.full[value_stage_][0], value_phases_.full(value_stage_));
    if (key == 0) clear_tail(own_keys_);
    const uint64_t value = ptx::wgmma_descriptor(smem_.sV[value_stage_], kPieceBytes);
    ptx::wgmma_touch(rO_);
    ptx::wgmma_touch(rP_);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) {
      ptx::wgmma_k16<Element, ptx::kMNMajor>(rO_, static_cast<const uint32_t (&)[4]>(rP_[step]),
                                             ptx::advance_descriptor(value, step * kStepDims * kRowBytes),
                                             key > 0 || step > 0);
    }
    ptx::wgmma_commit();
  }

  // Values behind the sequence's end: their probabilities are zero, but zero times NaN is not. Both
  // warpgroups write the same.
  __device__ __forceinline__ void clear_tail(int own_keys) {
    if (own_keys == 0 || own_keys == kTileKeys) return;
    const int chunks = (kTileKeys - own_keys) * (kRowBytes / sizeof(uint4));
    for (int piece = 0; piece < kPieces; ++piece) {
      uint4* rows = reinterpret_cast<uint4*>(smem_.sV[value_stage_][piece][own_keys]);
#pragma unroll 1
      for (int i = thread_; i < chunks; i += kWarpgroupThreads) rows[i] = make_uint4(0, 0, 0, 0);
    }
    ptx::fence_async_shared();
    ptx::named_barrier_sync_unaligned(kTailCleared + half_, kWarpgroupThreads);
  }

  // Until at most `kPending` products issued later are unfinished.
  template <int kPending>
  __device__ __forceinline__ void finish_scores() {
    ptx::wgmma_wait<kPending>();
    ptx::wgmma_touch(rS_);
    release(&smem_.keys.empty[key_stage_][0], thread_);
    advance(key_stage_, key_phases_);
  }
  __device__ __forceinline__ void finish_values() {
    ptx::wgmma_wait<0>();
    ptx::wgmma_touch(rO_);
    ptx::wgmma_touch(rP_);
    release(&smem_.values.empty[value_stage_][0], thread_);
    advance(value_stage_, value_phases_);
  }

  // Where a tile's result goes.
  struct Place {
    int64_t row_0;   // of [tokens x heads]
    int begin, end;  // of the tile's rows
  };

  // Once all scores of the slot's tile are there: nobody reads its queries any more, nor what was told of it.
  __device__ __forceinline__ Place leave(int slot) {
    const Tile& tile = smem_.tiles[slot];
    const Place place = {tile.token * int64_t{params_.num_heads} + tile.head, tile.begin, tile.end};
    release(&smem_.told.empty[slot][0], thread_);
    return place;
  }

  // From registers: a quad writes 64 bytes of a row at a time.
  __device__ __forceinline__ void store(const Place& place, RowState state) {
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      state.sum[i] = quad_reduce(state.sum[i], [](float a, float b) { return a + b; });
    }
    const RowEnds ends(state, scale_log2_);
    constexpr int kChunks = kHeadDim * 2 / sizeof(uint4);  // of a row
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int row = half_ * kFragmentRows + at_.row(i);
      const bool answered = row >= place.begin && row < place.end;
      const int64_t place_of_row = place.row_0 + row * params_.num_heads;
      uint4* out = static_cast<uint4*>(params_.out) + place_of_row * kChunks + at_.in_quad;
#pragma unroll
      for (int group = 0; group < kChunks / 4; ++group) {
        const uint4 v = neighbours<Element>(rO_, i, group, ends.factor[i], at_.in_quad);
        if (answered) out[group * 4] = v;
      }
      if (params_.low != nullptr) {
        uint2* low = static_cast<uint2*>(params_.low) + place_of_row * kChunks + at_.in_quad;
#pragma unroll
        for (int group = 0; group < kChunks / 4; ++group) {
          const uint2 v = lower_neighbours<Element>(rO_, i, group, ends.factor[i], at_.in_quad);
          if (answered) low[group * 4] = v;
        }
      }
      if (answered && at_.in_quad == 0) {
        // Apart, for a backward pass to work out the same exponentials.
        const bool empty = state.sum[i] == 0.0f;
        params_.lse[place_of_row] =
            make_float2(empty ? -INFINITY : state.maximum[i], empty ? -INFINITY : log2f(state.sum[i]));
      }
    }
  }

  const PrefillParams& params_;
  SmemPlan& smem_;
  const int half_;
  const int thread_;
  const FragmentPosition at_;
  const float scale_log2_;

  Phases<kSlots> tile_phases_;
  Phases<kKeyStages> key_phases_;
  Phases<kValueStages> value_phases_;
  int key_stage_ = 0, value_stage_ = 0;

  RowState state_;
  int own_keys_ = 0;  // of the tile that is begun
  float rS_[kScoreRegisters];
  float rO_[kOutRegisters];
  uint32_t rP_[kKeySteps][4];
};

}  // namespace pallas_attn::blocksparse::sm90
