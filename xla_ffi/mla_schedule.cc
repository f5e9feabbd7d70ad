// FFI handler of the schedule kernel.
#include <cuda_runtime.h>

#include "checks.h"
#include "device_guard.h"
#include "mla/params.h"
#include "mla/schedule/dealing.h"
#include "mla/schedule/schedule.h"
#include "xla/ffi/api/ffi.h"

namespace pallas_attn {
namespace {

namespace ffi = xla::ffi;
using ffi::DataType;

constexpr char kName[] = "pallas_attn_mla_schedule_sm90";

ffi::Error mla_schedule(cudaStream_t stream, int32_t device, ffi::AnyBuffer seq_lens,
                        ffi::Result<ffi::AnyBuffer> schedule_metadata, ffi::Result<ffi::AnyBuffer> num_splits,
                        int64_t overhead_blocks, int64_t rows) {
  ArgumentChecker check(kName);
  check.array("seq_lens", seq_lens, {-1}, {DataType::S32});
  check.array("schedule_metadata", *schedule_metadata, {-1, mla::kScheduleFields}, {DataType::S32});
  if (!check.ok()) return check.error();
  const int64_t batch = seq_lens.dimensions()[0];
  const int64_t num_parts = schedule_metadata->dimensions()[0];
  check.array("num_splits", *num_splits, {batch + 1}, {DataType::S32});
  check.between("seq_lens", "", 1, mla::kMostRequests, batch);
  check.between("schedule_metadata", "", 1, mla::kMostParts, num_parts);
  check.between("overhead_blocks", "", 0, mla::kMostOverheadPages, overhead_blocks);
  check.between("rows", "", 1, INT32_MAX, rows);
  if (!check.ok()) return check.error();

  mla::ScheduleParams params = {};
  params.seq_lens = seq_lens.typed_data<int32_t>();
  params.schedule = schedule_metadata->typed_data<int32_t>();
  params.num_splits = num_splits->typed_data<int32_t>();
  params.batch = static_cast<int>(batch);
  params.num_sm_parts = static_cast<int>(num_parts);
  params.overhead_pages = static_cast<int>(overhead_blocks);
  params.rows = static_cast<int>(rows);

  return launched(kName, device, stream, mla::launch_schedule, params);
}

}  // namespace
}  // namespace pallas_attn

XLA_FFI_DEFINE_HANDLER_SYMBOL(pallas_attn_mla_schedule_sm90, pallas_attn::mla_schedule,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Arg<xla::ffi::AnyBuffer>()  // seq_lens
                                  .Ret<xla::ffi::AnyBuffer>()  // schedule_metadata
                                  .Ret<xla::ffi::AnyBuffer>()  // num_splits
                                  .Attr<int64_t>("overhead_blocks")
                                  .Attr<int64_t>("rows"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
