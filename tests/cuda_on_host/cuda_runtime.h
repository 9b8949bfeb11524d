// The CUDA runtime on the host, under CUDA's names: what src/backends/cuda/ includes when g++ compiles it. A CUDA thread is a
// fiber, blocks and threads run in an order that a seed shuffles (TILELOSS_CUDA_SEED), and what a stream is given is done only
// when somebody synchronises. Only what the backend calls is here.
#pragma once

#include "tests/cuda_on_host/device_code.h"
#include "tests/cuda_on_host/host_calls.h"
