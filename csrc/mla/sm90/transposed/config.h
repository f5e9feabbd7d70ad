// Sizes of the kernel over tokens of 656 bytes, and the words for them. In its products a page's tokens, or
// the value's columns, are the rows, and the query's rows are the columns:
//
//   row tile      16, 32 or 64 query rows that share a KV head: the columns of every product of a CTA
//   run, part     as in dense/config.h
//   owner         of a page: the math warpgroup that computes its scores and softmax, taking turns
//   half          of the value's columns: what a math warpgroup accumulates
//   block         128 latent dimensions that share a scale; the rotary ones are a fifth block of 64
#pragma once

#include <cstdint>

#include "mla/sm90/dense/config.h"
#include "ptx/control.h"

namespace pallas_attn::mla::sm90::transposed {

constexpr int kOwners = 2;
constexpr uint32_t kPageBytes = kPageTokens * kTokenBytes;
constexpr int kBlocks = kLatentDim / kScaleGroup;

// Fragments of a half: 64 columns each, of which a warp has 16. A thread has kColumns neighbours in all.
constexpr int kColumnTiles = kHalfDims / kFragmentRows;
constexpr int kWarpColumns = kHalfDims / kWarpgroupWarps;
constexpr int kColumns = kColumnTiles * kRowsPerThread;

// Three warpgroups' registers, of which the math needs nearly all (dense/config.h).
constexpr int kMathRegisters = 240, kProducerRegisters = 24;
static_assert(kOwners * kMathRegisters + kProducerRegisters <= 3 * 168);

// Where a thread stands: lane l holds rows l / 4 and l / 4 + 8 of its warp's 16, and columns 2 (l % 4) and
// the next of every eight (sm90/fragment.h). Here rows are tokens or columns of the value, columns query
// rows.
struct Place {
  int owner;  // this warpgroup
  int warp;   // in the warpgroup
  int lane;
  int line;  // lane / 4
  int pair;  // lane % 4

  __device__ Place(int owner_, int thread)
      : owner(owner_),
        // Through a shuffle, so that the compiler knows it to be uniform in a warp.
        warp(__shfl_sync(0xffffffff, thread / 32, 0)),
        lane(thread % 32),
        line(lane / 4),
        pair(lane % 4) {}

  // The same place, its lane asked for again. To the compiler that is another lane, so it keeps nothing that
  // follows from it in registers from one step of a page to the next.
  __device__ Place anew() const {
    Place place = *this;
    place.lane = ptx::lane();
    place.line = place.lane / 4;
    place.pair = place.lane % 4;
    return place;
  }

  __device__ int thread() const { return warp * 32 + lane; }
  // Token i (0 or 1) of the page that this thread holds scores of.
  __device__ int token(int i) const { return warp * kWarpRows + i * 8 + line; }
  // The first of the two query rows in group j of eight.
  __device__ int row(int j) const { return j * 8 + pair * 2; }
  // The first of this thread's columns of the value.
  __device__ int column() const { return owner * kHalfDims + column_of_half(); }
  __device__ int column_of_half() const { return warp * kWarpColumns + line * kColumns; }
  // The block it lies in.
  __device__ int block() const {
    return owner * (kBlocks / kOwners) + warp / (kWarpgroupWarps * kOwners / kBlocks);
  }
};

}  // namespace pallas_attn::mla::sm90::transposed
