// The CUDA MLA kernels behind two plain C functions, so that mla_graph.py can call them from torch.
#include "mla/params.h"
#include "mla/schedule/schedule.h"
#include "mla/sm90/dense/launch.h"

using namespace pallas_attn;

#define EXPORTED extern "C" __attribute__((visibility("default")))

// For the caller to compare with its own idea of the structures.
EXPORTED int mla_schedule_params_bytes() { return sizeof(mla::ScheduleParams); }
EXPORTED int mla_decode_params_bytes() { return sizeof(mla::DecodeParams); }

EXPORTED int mla_schedule(const mla::ScheduleParams* params, cudaStream_t stream) {
  return mla::launch_schedule(*params, stream).error;
}

EXPORTED int mla_decode(const mla::DecodeParams* params, cudaStream_t stream) {
  return mla::sm90::launch_dense_decode(*params, stream).error;
}
