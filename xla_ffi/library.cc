// What pallas_attn/_call/ffi.py asks of the library as a whole. These functions are all that it exports.
#include <cuda_runtime.h>

#include "xla/ffi/api/ffi.h"

#define PALLAS_ATTN_TARGET(name) XLA_FFI_DECLARE_HANDLER_SYMBOL(name);
#include "targets.def"
#undef PALLAS_ATTN_TARGET

#define EXPORTED extern "C" __attribute__((visibility("default")))

struct Target {
  const char* name;
  XLA_FFI_Handler* handler;
};

// Ends with a target without a name.
EXPORTED const Target* pallas_attn_ffi_targets() {
  static constexpr Target kTargets[] = {
#define PALLAS_ATTN_TARGET(name) {#name, name},
#include "targets.def"
#undef PALLAS_ATTN_TARGET
      {nullptr, nullptr},
  };
  return kTargets;
}

// The CUDA version the library was built with, and the newest one that this machine's driver runs, 0 where
// there is no driver: 13000 for CUDA 13.0. Starts nothing on the GPU.
EXPORTED void pallas_attn_cuda_versions(int* built_with, int* driver) {
  *built_with = CUDART_VERSION;
  if (cudaDriverGetVersion(driver) != cudaSuccess) *driver = 0;
}
