// How far a warpgroup's products run behind their issue: the stamps of instructions in a row, of one
// warpgroup alone, and of two of which the second begins when the first has issued some.
#include "common.cuh"
#include "products.cuh"

constexpr int KIB = 1024, SMEM = 97 * KIB, COUNT = 24, ROUNDS = 20, GROUPS = 2;

__device__ __forceinline__ uint64_t operand(uint32_t at) {
  return (at & 0x3ffff) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
__device__ __forceinline__ uint32_t ticks() {
  uint32_t cycles;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(cycles)::"memory");
  return cycles;
}

// out: (group, COUNT + 2) cycles since the first group's start, in the last round: before each
// instruction, when all are issued, when all are done.
template <int WIDTH, bool REGISTERS>
__global__ void __launch_bounds__(GROUPS * 128, 1) issued(int groups, int later, uint32_t* out, float* sink) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ uint32_t begun;
  const uint32_t data = (smem(memory) + 1023) / 1024 * 1024;
  for (int i = threadIdx.x; i < 96 * KIB / 4; i += blockDim.x)
    reinterpret_cast<uint32_t*>(memory + (data - smem(memory)))[i] = (i * 2654435761u & 0x807f807f) | 0x3f003f00;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  const int group = threadIdx.x / 128;
  float d[WIDTH / 2];
#pragma unroll
  for (int i = 0; i < WIDTH / 2; ++i) d[i] = 0;
  const uint32_t from_registers[4] = {0x3f803f00u ^ threadIdx.x << 31, 0x3f003f80u, 0xbf803f00u, 0x3f80bf00u};
  uint32_t at[COUNT + 2];
  for (int round = 0; round < ROUNDS; ++round) {
    __syncthreads();
    if (threadIdx.x == 0) begun = ticks();
    __syncthreads();
    const uint32_t start = begun;
    if (group >= groups) continue;
    while (ticks() - start < 200 + group * later) {
    }
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
      at[k] = ticks();
      const uint64_t right = operand(data + 32 * KIB + k % 4 * 32);
      if constexpr (REGISTERS) {
        Product<WIDTH, true>::issue(d, from_registers, right);
      } else {
        Product<WIDTH, false>::issue(d, operand(data + group * 16 * KIB + k % 4 * 32), right);
      }
    }
    at[COUNT] = ticks();
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    at[COUNT + 1] = ticks();
    if (threadIdx.x % 128 == 0)
      for (int k = 0; k < COUNT + 2; ++k) out[group * (COUNT + 2) + k] = at[k] - start - 200;
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < WIDTH / 2; ++i) sum += d[i];
  if (sum == 12345.678f) *sink = sum;
}

template <int WIDTH, bool REGISTERS>
void queue_case(int groups, int later) {
  static uint32_t* out = nullptr;
  if (!out) CHECK(cudaMallocHost(&out, GROUPS * (COUNT + 2) * sizeof(uint32_t)));
  auto kernel = issued<WIDTH, REGISTERS>;
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM));
  std::vector<std::vector<double>> found(GROUPS * (COUNT + 2));
  for (int i = 0; i < repeats(); ++i) {
    kernel<<<1, GROUPS * 128, SMEM>>>(groups, later, out, nullptr);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    for (size_t k = 0; k < found.size(); ++k) found[k].push_back(static_cast<int32_t>(out[k]));
  }
  const std::string name = "queue/m64n" + std::to_string(WIDTH) + "k16, A from " + (REGISTERS ? "registers" : "shared memory") +
                           (groups == 1 ? ", alone" : ", second after " + std::to_string(later) + " cycles");
  for (int group = 0; group < groups; ++group)
    for (int k = 0; k < COUNT + 2; ++k) {
      const std::string what = k < COUNT ? "instruction " + std::to_string(k) : k == COUNT ? "all issued" : "all done";
      report(name + ", warpgroup " + std::to_string(group) + ", " + what, "cycles", "after the first warpgroup's start",
             found[group * (COUNT + 2) + k]);
    }
}
template <int WIDTH, bool REGISTERS>
void queue_cases() {
  queue_case<WIDTH, REGISTERS>(1, 0);
  for (int later : {0, 60}) queue_case<WIDTH, REGISTERS>(2, later);  // of more, the first one begins later, too
}

int main() {
  report_clock("queue before");
  queue_cases<64, false>(), queue_cases<128, false>(), queue_cases<64, true>(), queue_cases<128, true>();
  report_clock("queue after");
}
