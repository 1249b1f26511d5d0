// Functions that CPU and CUDA share.
#pragma once

#if defined(__CUDACC__)
#define ZB_HOST_DEVICE __host__ __device__
#else
#define ZB_HOST_DEVICE
#endif
