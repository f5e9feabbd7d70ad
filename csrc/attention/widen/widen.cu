#include <algorithm>

#include "attention/widen/kernel.h"
#include "attention/widen/widen.h"
#include "common/dependent_launch.h"
#include "common/multiprocessors.h"
#include "ptx/control.h"

namespace pallas_attn::attention {
namespace {

constexpr int kCtas = 4;  // of a multiprocessor

template <typename Element, bool kE4m3>
__global__ void __launch_bounds__(kWidenThreads, kCtas)
    widen_kernel(const __grid_constant__ WidenParams params) {
  ptx::wait_for_previous_kernel();
  ptx::allow_dependent_launch();
  extern __shared__ int first_row[];
  __shared__ typename Widening<Element, kE4m3>::Scratch scratch;
  Widening<Element, kE4m3>(params, first_row).work(scratch);
}

template <typename Element>
auto kernel_of(CacheType cache) {
  return cache == CacheType::kE4m3 ? widen_kernel<Element, true> : widen_kernel<Element, false>;
}

}  // namespace

LaunchStatus launch_widen(const WidenParams& params, cudaStream_t stream) {
  const ForwardParams& call = params.call;
  const auto kernel = call.element == ElementType::kBfloat16 ? kernel_of<__nv_bfloat16>(call.cache)
                                                             : kernel_of<__half>(call.cache);
  int num_sms = 0;
  const LaunchStatus status = count_multiprocessors(&num_sms);
  if (!status.ok()) return status;
  const int64_t units = int64_t{ceil_div(params.room, kWidenTokens)} * call.num_kv_heads;
  const int ctas = static_cast<int>(std::min<int64_t>(kCtas * num_sms, (units - 1) / kWidenWarps + 1));
  const size_t shared_bytes = (call.num_seqs + 1) * sizeof(int);
  return launch_dependent(kernel, dim3(ctas), kWidenThreads, shared_bytes, stream, Blocks::kIndependent,
                          "launching the kernel that widens", params);
}

}  // namespace pallas_attn::attention
