// From ids of tokens to documents: the rank of each token's, and where each rank's tokens lie.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/status.h"

namespace pallas_attn::attention {

// Ranks count documents by their first tokens, queries in front of keys.
struct DocumentsParams {
  const int* q_ids;  // [batch, q_len], any numbers
  const int* k_ids;  // [batch, k_len]; null, and k_len 0: keys are the queries' own tokens
  int* q_ranks;      // [batch, q_len]
  int* q_table;  // [batch, tokens, 3] of q_len + k_len tokens, as Spans have it; zeros behind the last rank
  int* k_ranks;
  int* k_table;
  int* scratch;  // [batch, documents_scratch(tokens)]
  int batch, q_len, k_len;
};

constexpr int64_t kMostDocumentTokens = int64_t{1} << 29;  // of queries and keys

// Slots of a hash table of as many entries as there may be: a power of two, at least twice as many.
constexpr int kLeastSlots = 64;
constexpr int64_t documents_slots(int64_t entries) {
  int64_t slots = kLeastSlots;
  while (slots < 2 * entries) slots *= 2;
  return slots;
}

// Words of a row of a batch: three for each token, and the table.
constexpr int64_t documents_scratch(int64_t tokens) { return 3 * tokens + 1 + documents_slots(tokens); }

LaunchStatus launch_documents(const DocumentsParams& params, cudaStream_t stream);

}  // namespace pallas_attn::attention
