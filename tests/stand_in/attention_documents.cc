// What finds documents on the host, for test_attention_documents_on_host.py: ids from standard input, ranks
// and tables of both sides to standard output.
#include "arrays.h"
#include "attention/documents/kernel.h"

namespace {

using namespace pallas_attn;
using namespace pallas_attn::attention;
using stand_in::Array;

alignas(1024) char shared_memory[stand_in::kSharedBytes];

struct Call {
  int batch, q_len, k_len;  // 0: keys are the queries' own tokens
};

}  // namespace

int main() {
  Call call;
  if (std::fread(&call, sizeof(call), 1, stdin) != 1) stand_in::fail("no call");
  const int tokens = call.q_len + call.k_len;
  auto q_ids = Array<int>(call.batch * call.q_len).read(), k_ids = Array<int>(call.batch * call.k_len).read();
  Array<int> q_ranks(q_ids.size()), k_ranks(k_ids.size());
  Array<int> q_table(call.batch * tokens * kDocumentStep), k_table(call.k_len > 0 ? q_table.size() : 0);
  Array<int> scratch(call.batch * documents_scratch(tokens));
  DocumentsParams params = {};
  params.q_ids = q_ids.data(), params.k_ids = call.k_len > 0 ? k_ids.data() : nullptr;
  params.q_ranks = q_ranks.data(), params.q_table = q_table.data();
  params.k_ranks = k_ranks.data(), params.k_table = k_table.data();
  params.scratch = scratch.data();
  params.batch = call.batch, params.q_len = call.q_len, params.k_len = call.k_len;
  stand_in::shared = shared_memory;
  stand_in::threads = kDocumentsThreads;
  stand_in::run_grid(dim3(call.batch), 1, [&] {
    DocumentFinder(params, blockIdx.x, *reinterpret_cast<DocumentFinder::Scratch*>(stand_in::shared)).find();
  });
  for (Array<int>* found : {&q_ranks, &q_table, &k_ranks, &k_table}) found->write();
}
