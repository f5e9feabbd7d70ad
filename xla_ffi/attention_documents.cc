// FFI handler of the kernel that finds packed documents.
#include <cuda_runtime.h>

#include <tuple>

#include "attention/documents/documents.h"
#include "attention/params.h"
#include "attention_heads.h"
#include "checks.h"
#include "device_guard.h"
#include "xla/ffi/api/ffi.h"

namespace pallas_attn {
namespace {

namespace ffi = xla::ffi;
using ffi::DataType;

constexpr char kName[] = "pallas_attn_attention_documents_sm90";

ffi::Error attention_documents(cudaStream_t stream, int32_t device, ffi::AnyBuffer q_ids,
                               ffi::AnyBuffer k_ids, ffi::Result<ffi::AnyBuffer> q_ranks,
                               ffi::Result<ffi::AnyBuffer> q_table, ffi::Result<ffi::AnyBuffer> k_ranks,
                               ffi::Result<ffi::AnyBuffer> k_table, ffi::Result<ffi::AnyBuffer> scratch) {
  ArgumentChecker check(kName);
  check.array("q_ids", q_ids, {-1, -1}, {DataType::S32});
  check.array("k_ids", k_ids, {-1, -1}, {DataType::S32});
  if (!check.ok()) return check.error();
  const int64_t batch = q_ids.dimensions()[0], q_len = q_ids.dimensions()[1];
  const int64_t k_len = k_ids.dimensions()[1], tokens = q_len + k_len;
  const bool apart = k_len > 0;
  check.array("k_ids", k_ids, {apart ? batch : 0, k_len}, {DataType::S32});
  check.between("q_ids", " rows", 1, kMaxInt, batch);
  check.between("q_ids", " tokens", 1, attention::kMostDocumentTokens, q_len);
  check.between("k_ids", " tokens with those of queries", 1, attention::kMostDocumentTokens, tokens);
  if (!check.ok()) return check.error();
  for (const auto& [ranks_name, table_name, ranks, table, length] :
       {std::tuple{"q_ranks", "q_table", q_ranks, q_table, q_len},
        {"k_ranks", "k_table", k_ranks, k_table, k_len}}) {
    const int64_t rows = length > 0 ? batch : 0;
    check.array(ranks_name, *ranks, {rows, length}, {DataType::S32});
    check.array(table_name, *table, {rows, tokens, attention::kDocumentStep}, {DataType::S32});
  }
  check.array("scratch", *scratch, {batch, attention::documents_scratch(tokens)}, {DataType::S32});
  if (!check.ok()) return check.error();

  attention::DocumentsParams params = {};
  params.q_ids = q_ids.typed_data<int32_t>();
  params.k_ids = optional<int>(k_ids);
  params.q_ranks = q_ranks->typed_data<int32_t>();
  params.q_table = q_table->typed_data<int32_t>();
  params.k_ranks = k_ranks->typed_data<int32_t>();
  params.k_table = k_table->typed_data<int32_t>();
  params.scratch = scratch->typed_data<int32_t>();
  params.batch = static_cast<int>(batch);
  params.q_len = static_cast<int>(q_len);
  params.k_len = static_cast<int>(k_len);
  return launched(kName, device, stream, attention::launch_documents, params);
}

}  // namespace
}  // namespace pallas_attn

XLA_FFI_DEFINE_HANDLER_SYMBOL(pallas_attn_attention_documents_sm90, pallas_attn::attention_documents,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Arg<xla::ffi::AnyBuffer>()   // q_ids
                                  .Arg<xla::ffi::AnyBuffer>()   // k_ids
                                  .Ret<xla::ffi::AnyBuffer>()   // q_ranks
                                  .Ret<xla::ffi::AnyBuffer>()   // q_table
                                  .Ret<xla::ffi::AnyBuffer>()   // k_ranks
                                  .Ret<xla::ffi::AnyBuffer>()   // k_table
                                  .Ret<xla::ffi::AnyBuffer>(),  // scratch
                              {xla::ffi::Traits::kCmdBufferCompatible});
