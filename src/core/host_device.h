// Marks functions that run on the host and on a device.
#pragma once

#if defined(__CUDACC__) || defined(__HIPCC__)
#define TILELOSS_HOST_DEVICE __host__ __device__
#else
#define TILELOSS_HOST_DEVICE
#endif
