#include "attention/documents/documents.h"
#include "attention/documents/kernel.h"
#include "common/dependent_launch.h"
#include "ptx/control.h"

namespace pallas_attn::attention {
namespace {

__global__ void __launch_bounds__(kDocumentsThreads, 1)
    documents_kernel(const __grid_constant__ DocumentsParams params) {
  __shared__ DocumentFinder::Scratch scratch;
  ptx::wait_for_previous_kernel();
  ptx::allow_dependent_launch();
  DocumentFinder(params, ptx::block_x(), scratch).find();
}

}  // namespace

LaunchStatus launch_documents(const DocumentsParams& params, cudaStream_t stream) {
  return launch_dependent(documents_kernel, dim3(params.batch), kDocumentsThreads, 0, stream,
                          Blocks::kIndependent, "launching the kernel that finds documents", params);
}

}  // namespace pallas_attn::attention
