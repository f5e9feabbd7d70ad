// Function qualifiers that a host compiler without CUDA's headers takes as well, so that what depends on no
// GPU can be built and tested on any machine.
#pragma once

#ifdef __CUDACC__
#define PALLAS_ATTN_HOST_DEVICE __host__ __device__
#define PALLAS_ATTN_DEVICE __device__
#else
#define PALLAS_ATTN_HOST_DEVICE
#define PALLAS_ATTN_DEVICE
#endif
