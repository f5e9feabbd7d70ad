// Memory and errors of the programs that the sanitizers run.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "common/status.h"

namespace {

using pallas_attn::LaunchStatus;

void check(cudaError_t error, const char* step) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", step, cudaGetErrorString(error));
  std::exit(1);
}

void check(const LaunchStatus& status) { check(status.error, status.message.c_str()); }

template <typename T>
T* on_device(const std::vector<T>& host) {
  T* device = nullptr;
  check(cudaMalloc(&device, host.size() * sizeof(T)), "cudaMalloc");
  check(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "copying in");
  return device;
}

// Left as it is, so that initcheck sees what is read before it is written.
template <typename T>
T* unwritten(size_t count) {
  T* device = nullptr;
  check(cudaMalloc(&device, count * sizeof(T)), "cudaMalloc");
  return device;
}

// For what the copy engine writes, which initcheck does not see: whatever is read before it is written makes
// the result NaN, and the comparison fails.
template <typename T>
T* filled_with_nan(size_t count) {
  T* device = unwritten<T>(count);
  check(cudaMemset(device, 0xFF, count * sizeof(T)), "filling");
  return device;
}

template <typename T>
std::vector<T> on_host(const T* device, size_t count) {
  std::vector<T> host(count);
  check(cudaMemcpy(host.data(), device, count * sizeof(T), cudaMemcpyDeviceToHost), "copying out");
  return host;
}

cudaStream_t stream_on_all_multiprocessors() {
  cudaStream_t stream;
  check(cudaStreamCreate(&stream), "creating a stream");
  return stream;
}

// How far results are from what is right, and whether all are within `limit` of it.
struct Verdict {
  float limit;
  double worst = 0;
  bool right = true;

  void add(double error) {
    worst = std::max(worst, error);
    right &= error < limit;  // false of NaN
  }
  void expect(bool so) { right &= so; }
  bool tell(const std::string& name) const {
    std::printf("%s: %s, worst error %.1e\n", name.c_str(), right ? "right" : "WRONG", worst);
    return right;
  }
};

}  // namespace
