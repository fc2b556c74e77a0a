/* Returns the text of a CUDA error. */
#include <cuda_runtime.h>

#include "kvevict.h"

const char *kv_cuda_text(int error) { return cudaGetErrorString((cudaError_t)error); }
