// FFI handler of the schedule kernel.
#include <cuda_runtime.h>

#include "checks.h"
#include "mla/params.h"
#include "mla/schedule/schedule.h"
#include "xla/ffi/api/ffi.h"

namespace pallas_attn {
namespace {

namespace ffi = xla::ffi;
using ffi::DataType;

constexpr char kName[] = "pallas_attn_mla_schedule_sm90";

ffi::Error mla_schedule(cudaStream_t stream, ffi::AnyBuffer seq_lens,
                        ffi::Result<ffi::AnyBuffer> schedule_metadata, ffi::Result<ffi::AnyBuffer> num_splits,
                        int64_t overhead_blocks) {
  ArgumentChecker check(kName);
  check.array("seq_lens", seq_lens, {-1}, {DataType::S32});
  if (!check.ok()) return check.error();
  const int64_t batch = seq_lens.dimensions()[0];
  check.require(batch > 0, "seq_lens", "at least one request", "none");
  check.array("schedule_metadata", *schedule_metadata, {-1, mla::kScheduleFields}, {DataType::S32});
  check.array("num_splits", *num_splits, {batch + 1}, {DataType::S32});
  check.require(overhead_blocks >= 1 && overhead_blocks <= 1024, "overhead_blocks", "between 1 and 1024",
                std::to_string(overhead_blocks));
  if (!check.ok()) return check.error();

  mla::ScheduleParams params = {};
  params.seq_lens = seq_lens.typed_data<int32_t>();
  params.schedule = schedule_metadata->typed_data<int32_t>();
  params.num_splits = num_splits->typed_data<int32_t>();
  params.batch = static_cast<int>(batch);
  params.num_sm_parts = static_cast<int>(schedule_metadata->dimensions()[0]);
  params.overhead_pages = static_cast<int>(overhead_blocks);
  return to_error(kName, mla::launch_schedule(params, stream));
}

}  // namespace
}  // namespace pallas_attn

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(pallas_attn_mla_schedule_sm90, pallas_attn::mla_schedule,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::AnyBuffer>()  // seq_lens
                                  .Ret<xla::ffi::AnyBuffer>()  // schedule_metadata
                                  .Ret<xla::ffi::AnyBuffer>()  // num_splits
                                  .Attr<int64_t>("overhead_blocks"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
#pragma GCC visibility pop
