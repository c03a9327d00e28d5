// What memory gives streams that read and write at once: bytes per second by how many of them are written.
#include "common.cuh"

constexpr long ELEMENTS = 1l << 28;  // 16 bytes each: 4 GiB, many times L2

// Reads READS vectors and writes WRITES for each step, side by side.
template <int READS, int WRITES>
__global__ void __launch_bounds__(512) stream(const uint4* from, uint4* to, long steps) {
  uint4 sum = {1, 2, 3, 4};
  for (long i = blockIdx.x * 512l + threadIdx.x; i < steps; i += gridDim.x * 512l) {
#pragma unroll
    for (int r = 0; r < READS; ++r) {
      const uint4 x = __ldcs(from + r * steps + i);
      sum.x ^= x.x, sum.y ^= x.y, sum.z ^= x.z, sum.w ^= x.w;
    }
#pragma unroll
    for (int w = 0; w < WRITES; ++w) to[w * steps + i] = sum;
  }
  if (WRITES == 0 && sum.x == 0x12345678 && sum.y == 0x9abcdef0) to[0] = sum;
}

template <int READS, int WRITES>
void stream_case() {
  static uint4 *from = nullptr, *to = nullptr;
  if (!from) CHECK(cudaMalloc(&from, ELEMENTS * 16)), CHECK(cudaMalloc(&to, ELEMENTS * 16));
  const long steps = ELEMENTS / std::max(READS, WRITES);
  const double bytes = 16.0 * steps * (READS + WRITES);
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin)), CHECK(cudaEventCreate(&end));
  std::vector<double> found;
  for (int i = -1; i < repeats(); ++i) {
    CHECK(cudaEventRecord(begin));
    stream<READS, WRITES><<<132 * 4, 512>>>(from, to, steps);
    CHECK(cudaEventRecord(end));
    CHECK(cudaDeviceSynchronize());
    float ms = 0;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 0) found.push_back(bytes / ms * 1e-9);
  }
  report("streams/" + std::to_string(READS) + " read, " + std::to_string(WRITES) + " written", "TB/s",
         "of " + std::to_string(static_cast<long>(bytes) >> 20) + " MiB, both directions together", found);
}

int main() {
  report_clock("streams before");
  stream_case<1, 0>(), stream_case<4, 1>(), stream_case<2, 1>(), stream_case<1, 1>(), stream_case<1, 2>(), stream_case<0, 1>();
  report_clock("streams after");
}
