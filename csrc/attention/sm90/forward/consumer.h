// A math warpgroup: its 64 rows of every tile against the key tiles that they see. The product with one key
// tile's values follows that of the next one's scores, also from one tile of queries to the next, and both
// run beside the other warpgroups' exponentials.
#pragma once

#include <cuda_fp16.h>

#include <type_traits>

#include "attention/rules.h"
#include "attention/sm90/forward/documents.h"
#include "attention/sm90/forward/list_entries.h"
#include "attention/sm90/forward/logits.h"
#include "attention/sm90/forward/products.h"
#include "attention/sm90/forward/smem_plan.h"
#include "attention/sm90/forward/softmax.h"
#include "attention/sm90/forward/store.h"
#include "attention/sm90/forward/turns.h"
#include "attention/sm90/forward/unseen.h"
#include "ptx/control.h"
#include "ptx/mbarrier.h"
#include "ptx/wgmma.h"
#include "sm90/online_softmax.h"
#include "sm90/ring.h"

namespace pallas_attn::attention::sm90 {

struct Nothing {};

template <typename Element, typename Shape, Form kForm>
class Consumer {
 public:
  using Plan = SmemPlan<Shape>;
  using Told = typename Plan::Told;

  __device__ Consumer(const ForwardParams& params, Plan& smem, int warpgroup, int thread)
      : params_(params),
        smem_(smem),
        shaped_(params.softcap > 0.0f || params.alibi != nullptr),
        group_(params.group),
        warpgroup_(warpgroup),
        thread_(thread),
        turns_{warpgroup},
        at_(thread),
        window_(params),
        scale_(__ldg(params.scale)),
        factor_(shaped_ ? 1.0f : scale_ * kLog2E) {}

  __device__ void work() {
    if (warpgroup_ == Shape::kMath - 1) turns_.pass();
    bool more = open(told_);
    if (more && is_idle(told_)) turns_.let_pass();
    while (more) {
      if (is_idle(told_)) {
        more = stand_by();
        continue;
      }
      wait_for_keys();
      turns_.take();
      issue_scores();
      turns_.pass();
      ask_for_pairs(smem_.tiles[told_]);
      finish_scores<0>();
      begin(smem_.tiles[told_]);
      float rescale[kRowsPerThread];
      shape(smem_.tiles[told_]);
      redo_softmax(rescale);
      more = kAhead ? walk_ahead(rescale) : walk(rescale);
    }
  }

 private:
  static constexpr int kKeys = Shape::kKeys;
  // What values have in common is off by as much as rounded probabilities are from adding up to 1. Gradients
  // of fp16 have the digits to show it.
  using Summed =
      std::conditional_t<kForm == Form::kFull && std::is_same_v<Element, __half>, Rounded<Element>, Exact>;
  static constexpr int kKeySteps = kKeys / kStepDims;
  static constexpr bool kAhead = Shape::kQueryStages > 1;  // with queries of the next tile

  // One loop over all key tiles of all tiles, so that its code is there once: short tiles are many, and what
  // is not in the instruction cache takes longer than their products. A tile's last product, too, runs beside
  // the softmax of the next one's first scores. Whether there is a tile more, of which none of the
  // warpgroup's rows is a query's.
  __device__ __forceinline__ bool walk_ahead(float (&rescale)[kRowsPerThread]) {
    bool first = true;  // of the tile's products with values
    bool more = true;
    while (true) {
      first = walk_plain(rescale, first);
      const Told& tile = smem_.tiles[told_];
      const bool leaves = key_ == last_key_;
      int scored = told_;
      if (leaves) {
        // All scores of the tile are there: nobody reads its queries any more.
        release(&smem_.queries.empty[query_stage_][0], thread_);
        advance(query_stage_, query_phases_);
        scored = next_told(told_);
        more = open(scored);
        if (!more || is_idle(scored)) break;
      }
      prepare_values(tile);
      wait_for_keys();
      turns_.take();
      issue_scores();
      issue_values(first);
      turns_.pass();
      ask_for_pairs(smem_.tiles[scored], (leaves ? smem_.tiles[scored].num_keys : key_) - 1);
      finish_scores<1>();
      const RowState ended = state_;
      if (leaves) {
        begin(smem_.tiles[scored]);
      } else {
        --key_;
      }
      shape(smem_.tiles[scored]);
      const bool moved = softmax(rescale);
      if (leaves) {
        store(tile, ended);
        leave_tile();
      }
      if (moved) multiply_rows(rO_, rescale);
      first = leaves;
    }
    const Told& tile = smem_.tiles[told_];
    prepare_values(tile);
    if (more) turns_.take();
    issue_values(first);
    if (more) turns_.pass();
    finish_values();
    store(tile, state_);
    leave_tile();
    return more;
  }

  // From a key tile whose values are all seen by some query, through those of which all see all, while scores
  // need no shaping: most of a long tile's. Their code has hardly a jump. Ends with the tile's last such key
  // tile; whether the next product with values is still the tile's first.
  __device__ __forceinline__ bool walk_plain(float (&rescale)[kRowsPerThread], bool first) {
    const int end = max(open_begin_, last_key_);
    if (shaped_ || key_ > open_end_ || key_ >= seen_end_ || key_ <= end) return first;
    while (true) {
      bool fine;
      do {
        wait_for_keys();
        turns_.take();
        issue_scores();
        issue_values(first);
        turns_.pass();
        finish_scores<1>();
        --key_;
        leave_queries();
        fine = try_softmax();
        first = false;
      } while (fine && key_ > end);
      // Seldom, and behind the loop, which would have to jump over it.
      if (!fine && redo_softmax(rescale)) multiply_rows(rO_, rescale);
      if (key_ <= end) return false;
    }
  }

  // Tiles of which none of the warpgroup's rows is a query's, up to the next one that has some: keys and
  // values are given back as the others' turns come. Whether there is such a tile.
  __device__ __forceinline__ bool stand_by() {
    while (true) {
      const Told& tile = smem_.tiles[told_];
      begin(tile);
      bool more = true;
      while (true) {
        ptx::mbarrier_wait(&smem_.keys.full[key_stage_][0], key_phases_.full(key_stage_));
        release(&smem_.keys.empty[key_stage_][0], thread_);
        advance(key_stage_, key_phases_);
        const bool leaves = key_ == last_key_;
        if (leaves) {
          release(&smem_.queries.empty[query_stage_][0], thread_);
          advance(query_stage_, query_phases_);
          more = open(next_told(told_));
        }
        prepare_values(tile);
        ptx::mbarrier_wait(&smem_.values.full[value_stage_][0], value_phases_.full(value_stage_));
        release(&smem_.values.empty[value_stage_][0], thread_);
        advance(value_stage_, value_phases_);
        if (leaves) break;
        turns_.let_pass();
        --key_;
      }
      leave_tile();
      if (!more || !is_idle(told_)) return more;
      turns_.let_pass();
    }
  }

  __device__ __forceinline__ void leave_tile() {
    release(&smem_.told.empty[told_][0], thread_);
    told_ = next_told(told_);
  }

  // Whether a sequence's only tile has no query among the warpgroup's rows. In a prompt's last tile it works
  // on rows that are nobody's: to leave the walk for one tile takes longer.
  __device__ __forceinline__ bool is_idle(int told) const {
    const Told& tile = smem_.tiles[told];
    const int rows = (tile.is_lone ? tile.tokens : Shape::kRows) * group_.size;
    return kAhead && uniform(rows) <= warpgroup_ * kFragmentRows;
  }

  // With one tile's queries at a time, to the end: the next tile's come once this one's scores are done with
  // theirs. That is waited for beside the last exponentials and product, and the next tile's first product
  // runs beside the store.
  __device__ __forceinline__ bool walk(float (&rescale)[kRowsPerThread]) {
    leave_queries();
    while (true) {
      const Told& tile = smem_.tiles[told_];
      bool first = true;
      while (true) {
        first = walk_plain(rescale, first);
        if (key_ == last_key_) break;
        prepare_values(tile);
        wait_for_keys();
        turns_.take();
        issue_scores();
        issue_values(first);
        turns_.pass();
        ask_for_pairs(tile, key_ - 1);
        finish_scores<1>();
        --key_;
        leave_queries();
        shape(tile);
        const bool moved = softmax(rescale);
        if (moved) multiply_rows(rO_, rescale);
        first = false;
      }
      advance(query_stage_, query_phases_);
      const int next = next_told(told_);
      prepare_values(tile);
      turns_.take();
      issue_values(first);
      turns_.pass();
      const bool more = open(next);
      finish_values();
      if (!more) {
        store(tile, state_);
        return false;
      }
      wait_for_keys();
      turns_.take();
      issue_scores();
      turns_.pass();
      ask_for_pairs(smem_.tiles[next]);
      store(tile, state_);
      finish_scores<0>();
      begin(smem_.tiles[next]);
      leave_queries();
      shape(smem_.tiles[next]);
      redo_softmax(rescale);
      release(&smem_.told.empty[told_][0], thread_);
      told_ = next;
    }
  }

  // Where there is room for one tile's: as soon as its last scores are there.
  __device__ __forceinline__ void leave_queries() {
    if (kAhead) return;
    __syncwarp();
    if (thread_ % 32 == 0 && key_ == last_key_) ptx::mbarrier_arrive(&smem_.queries.empty[query_stage_][0]);
  }

  // Through a shuffle the compiler knows that a value is the warp's, and so is what hangs on it: loops,
  // stages and descriptors then live in uniform registers.
  __device__ __forceinline__ static int uniform(int x) { return __shfl_sync(0xffffffff, x, 0); }

  // Waits for a tile and its queries; false if there are no more.
  __device__ __forceinline__ bool open(int told) {
    ptx::mbarrier_wait(&smem_.told.full[told][0], told_phases_.full(told));
    if (uniform(smem_.tiles[told].kv_head) < 0) return false;
    told_phases_.advance(told);
    ptx::mbarrier_wait(&smem_.queries.full[query_stage_][0], query_phases_.full(query_stage_));
    return true;
  }

  // With the scores of a tile's first key tile, which is its last.
  __device__ __forceinline__ void begin(const Told& tile) {
    state_.reset();
    settled_ = false;
    last_key_ = uniform(tile.first_key);
    key_ = last_key_ + uniform(tile.num_keys) - 1;
    open_begin_ = uniform(tile.open_begin);
    open_end_ = uniform(tile.open_end);
    seen_end_ = uniform(tile.seen_end) / kKeys;
    // Other rows do not say how exponentials are worked out: what they hold is another document's.
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int row = warpgroup_ * kFragmentRows + at_.row(i);
      bool counts = is_answered<kForm>(params_, tile, group_, row);
      // What comes of a maximum of NaN is NaN.
      if constexpr (Shape::kListed) counts &= (tile.bad >> half_of(tile, i) & 1) == 0;
      if (!counts) state_.maximum[i] = NAN;
    }
    if constexpr (kScaledTiles) factor_ = factor_of(tile);
  }

  // The scale of logits; and what makes logits in base 2 of scores, or of what they were shaped to.
  __device__ __forceinline__ float scale_of(const Tile& tile) const {
    return kScaledTiles ? tile.scale : scale_;
  }
  __device__ __forceinline__ float factor_of(const Tile& tile) const {
    if constexpr (!kScaledTiles) return factor_;
    return shaped_ ? 1.0f : tile.scale * kLog2E;
  }

  // Whether other documents' keys lie between the tile's.
  static __device__ __forceinline__ bool is_mixed(const Tile& tile) {
    return kForm == Form::kFull && !Shape::kListed && tile.k_rank >= 0;
  }

  // Whether all of the tile's queries see all of the key tile.
  __device__ __forceinline__ bool is_open() const {
    return __builtin_expect(key_ >= open_begin_ && key_ < open_end_, true);
  }

  // Which pairs of a key tile count, where bits say it: on their way while its scores are.
  __device__ __forceinline__ void ask_for_pairs(const Told& tile, int key) {
    if constexpr (Shape::kListed) {
      if (key < tile.open_end) return;
      if (params_.lists.bits != nullptr) pairs_.look_up(params_.lists, tile, key, warpgroup_, thread_);
      if (params_.lists.united != nullptr) {
        pairs_.look_up_rows(params_.lists, tile, key, {half_of(tile, 0), half_of(tile, 1)});
      }
    }
  }
  // Which of two united rows the thread's row i is of.
  __device__ __forceinline__ int half_of(const Told& tile, int i) const {
    return warpgroup_ * kFragmentRows + at_.row(i) >= tile.upper_rows;
  }
  __device__ __forceinline__ void ask_for_pairs(const Told& tile) { ask_for_pairs(tile, tile.num_keys - 1); }

  // Scores become logits; those that do not count, -inf.
  __device__ __forceinline__ void shape(const Told& tile) {
    if (__builtin_expect(!shaped_ && is_open(), true)) return;
    Rows rows(params_, tile, window_, group_, warpgroup_ * kFragmentRows, at_);
    if (shaped_) shape_logits(rS_, params_, scale_of(tile), at_, key_ * kKeys, rows);
    if constexpr (Shape::kListed) {
      if (params_.lists.bits != nullptr) {
        if (!is_open()) pairs_.mask_others(rS_);
        return;
      }
      if (params_.lists.united != nullptr && !is_open()) pairs_.mask_other_rows(rS_);
#pragma unroll
      for (int& end : rows.end) end = max(end, tile.past_keys);
    }
    if (!is_open()) mask_outside(rS_, at_, key_ * kKeys, rows);
    if constexpr (kForm == Form::kFull) {
      if (is_mixed(tile)) OwnKeys<kKeys>(params_, tile, key_ * kKeys, thread_ % 32).mask_others(rS_, at_);
    }
  }

  // Over the probabilities that the product with values has been reading.
  __device__ __forceinline__ bool try_softmax() {
    return to_probabilities<Element, Summed>(rS_, factor_, state_, settled_, rP_, [&] { finish_values(); });
  }
  __device__ __forceinline__ bool redo_softmax(float (&rescale)[kRowsPerThread]) {
    return follow_to_probabilities<Element, Summed>(rS_, factor_, state_, settled_, rescale, rP_);
  }
  __device__ __forceinline__ bool softmax(float (&rescale)[kRowsPerThread]) {
    return !__builtin_expect(try_softmax(), true) && redo_softmax(rescale);
  }

  // In front of a turn, so that it is short.
  __device__ __forceinline__ void wait_for_keys() {
    ptx::mbarrier_wait(&smem_.keys.full[key_stage_][0], key_phases_.full(key_stage_));
    if (kGathered) ptx::fence_async_shared();
  }
  __device__ __forceinline__ void issue_scores() {
    multiply_keys<Element, Shape>(rS_, smem_.fragment_of(query_stage_, 0, warpgroup_), smem_.sK[key_stage_]);
  }

  // In front of a turn: all math warpgroups meet in it.
  __device__ __forceinline__ void prepare_values(const Tile& tile) {
    if (is_open()) return;
    ptx::mbarrier_wait(&smem_.values.full[value_stage_][0], value_phases_.full(value_stage_));
    if (kGathered) ptx::fence_async_shared();
    clear_unseen<Shape>(params_, tile, is_mixed(tile), smem_.sV[value_stage_], key_ * kKeys,
                        warpgroup_ * kWarpgroupThreads + thread_);
  }

  // With the values of the key tile at work.
  __device__ __forceinline__ void issue_values(bool first) {
    ptx::mbarrier_wait(&smem_.values.full[value_stage_][0], value_phases_.full(value_stage_));
    if (kGathered) ptx::fence_async_shared();
    multiply_values<Element, Shape>(rO_, rP_, smem_.sV[value_stage_], first);
  }

  // Until at most `kPending` products issued later are unfinished.
  template <int kPending>
  __device__ __forceinline__ void finish_scores() {
    ptx::wgmma_wait<kPending>();
    ptx::wgmma_touch(rS_);
    if constexpr (Shape::kConverted) {
      if (params_.key_scale_by_page || params_.new_key != nullptr) {
        scale_keys(rS_, smem_.raw.converted[key_stage_], at_);
      }
    }
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

  __device__ __forceinline__ void store(const Tile& tile, const RowState& state) {
    store_tile<Element, Shape, kForm>(params_, tile, rO_, state, factor_of(tile),
                                      kScaledTiles ? tile.value_scale : 1.0f, group_,
                                      warpgroup_ * kFragmentRows, at_);
  }

  const ForwardParams& params_;
  Plan& smem_;
  // Whether keys and values of a head may have scales of their own; whether threads copy, and do not tell the
  // asynchronous units.
  static constexpr bool kScaledTiles = Shape::kConverted || kForm == Form::kScaled;
  static constexpr bool kGathered = Shape::kFeed == Feed::kGathered;
  const bool shaped_;
  const Group group_;
  const int warpgroup_;
  const int thread_;
  const Turns<Shape::kMath> turns_;
  const FragmentPosition at_;
  const Window window_;

  Phases<kToldTiles> told_phases_;
  Phases<Shape::kQueryStages> query_phases_;
  Phases<Shape::kKeyStages> key_phases_;
  Phases<Shape::kValueStages> value_phases_;
  int told_ = 0, query_stage_ = 0, key_stage_ = 0, value_stage_ = 0;

  // Of the tile that is begun: the key tile at work, the one that comes last, those of which all queries see
  // all, and where those end of which each key is seen by some query of the sequence.
  int key_, last_key_, open_begin_, open_end_, seen_end_;
  float scale_, factor_;
  bool settled_;  // of its rows' maxima
  std::conditional_t<Shape::kListed, SeenPairs<kKeys>, Nothing> pairs_;
  RowState state_;
  float rS_[accumulators(kKeys)];
  float rO_[accumulators(Shape::kValueDim)];
  uint32_t rP_[kKeySteps][4];
};

}  // namespace pallas_attn::attention::sm90
