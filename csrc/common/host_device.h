// Function qualifiers, and a pragma, that a host compiler without CUDA's headers takes as well, so that what
// depends on no GPU can be built and tested on any machine.
#pragma once

#ifdef __CUDACC__
#define PALLAS_ATTN_HOST_DEVICE __host__ __device__
#define PALLAS_ATTN_DEVICE __device__
#define PALLAS_ATTN_UNROLL _Pragma("unroll")
#define PALLAS_ATTN_KEEP_LOOP _Pragma("unroll 1")
#else
#define PALLAS_ATTN_HOST_DEVICE
#define PALLAS_ATTN_DEVICE
#define PALLAS_ATTN_UNROLL
#define PALLAS_ATTN_KEEP_LOOP
#endif
