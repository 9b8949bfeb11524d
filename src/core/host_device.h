// Marks functions that run on the host and on a device.
#ifndef TILELOSS_CORE_HOST_DEVICE_H_
#define TILELOSS_CORE_HOST_DEVICE_H_

#if defined(__CUDACC__) || defined(__HIPCC__)
#define TILELOSS_HOST_DEVICE __host__ __device__
#else
#define TILELOSS_HOST_DEVICE
#endif

#endif  // TILELOSS_CORE_HOST_DEVICE_H_
