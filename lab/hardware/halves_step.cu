// A softmax step in isolation: a row of 128 scores in one thread, or in two that share its maximum.
//
// As the forward kernels do between the scores' product and P V: 128 keys of 128 rows become P. Plain
// instructions stand in for tensor memory: scores are made in registers by one FFMA each, P goes to
// shared memory as 16-byte stores. Each step starts when the one before has ended (a chain, as where
// the tensor core waits for P), for one Q tile alone or for two side by side.
//
//   whole    one warpgroup for a Q tile: 128 scores in a thread
//   halves   two: 64 scores in a thread; maxima by shared memory and two named barriers in turn
//   apart    as halves, without the exchange: another result, its cost
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <string>
#include <vector>

#ifndef STEPS
#define STEPS 512
#endif
constexpr int ROWS = 128, WARMUP = 16;
constexpr float SCALE = 0.127517444f;  // log2(e) / sqrt(128)

#ifdef LIMIT
#define REGISTERS(KEYS) __maxnreg__(LIMIT)
#else
#define REGISTERS(KEYS) __launch_bounds__(KEYS == 128 ? 2 * ROWS : 4 * ROWS)
#endif

__device__ float exp2_of(float x) {
  float y;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ void store(uint32_t at, const uint32_t* words) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(words[0]), "r"(words[1]),
               "r"(words[2]), "r"(words[3]) : "memory");
}
__device__ uint32_t packed(float low, float high) {
  uint32_t word;
  asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

// Scores of a step: one instruction each, every one from another so that none is computed twice.
template <int KEYS>
__device__ void make_scores(float (&s)[KEYS], float x, float y) {
#pragma unroll
  for (int i = 0; i < KEYS; ++i)
    s[i] = i < 8 ? fmaf(x, 0.7f - 0.1f * i, y) : fmaf(s[i - 8], i % 3 ? 0.93f : -1.04f, y);
}

template <int KEYS>
__device__ float largest(const float (&s)[KEYS], float floor) {
  float chain[4] = {floor, floor, floor, floor};
#pragma unroll
  for (int i = 0; i < KEYS; ++i) chain[i % 4] = fmaxf(chain[i % 4], s[i]);
  return fmaxf(fmaxf(chain[0], chain[1]), fmaxf(chain[2], chain[3]));
}

template <int KEYS>
__device__ float turn_into_p(float (&s)[KEYS], float highest, uint32_t at) {
  const float offset = -highest * SCALE;
  float sums[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int first = 0; first < KEYS; first += 8) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 8; ++i) s[first + i] = exp2_of(fmaf(s[first + i], SCALE, offset));
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = packed(s[first + 2 * i], s[first + 2 * i + 1]);
    store(at + first * 2 * ROWS, words);
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i % 4] += s[first + i];
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

template <int KEYS, bool EXCHANGE>
__global__ void REGISTERS(KEYS) steps(long long* cycles, float* sink) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ float maxima[2][2][2][ROWS];  // Q tile, half, place
  constexpr int GROUPS = 128 / KEYS;
  const int group = threadIdx.x / ROWS, row = threadIdx.x % ROWS;
  const int tile = group / GROUPS, half = group % GROUPS;
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(memory)) + group * ROWS * KEYS * 2 + row * 16;
  float highest = -1e30f, total = 0.f, x = 0.01f * row, y = 0.001f * row;
  long long start = 0;
  for (int step = -WARMUP; step < STEPS; ++step) {
    if (step == 0) start = clock64();
    asm volatile("" : "+f"(x), "+f"(y));  // nothing of the scores is known before
    float s[KEYS];
    make_scores(s, x, y);
    float most = largest(s, highest);
    if (EXCHANGE && GROUPS == 2) {
      const int place = step & 1, mine = 1 + (tile * 2 + half) * 2 + place;
      const int theirs = 1 + (tile * 2 + 1 - half) * 2 + place;
      maxima[tile][half][place][row] = most;
      asm volatile("barrier.cta.arrive %0, 256;" ::"r"(mine) : "memory");
      asm volatile("barrier.cta.sync %0, 256;" ::"r"(theirs) : "memory");
      most = fmaxf(most, maxima[tile][1 - half][place][row]);
    }
    const bool keep = (highest - most) * SCALE >= -8.f;
    highest = keep ? highest : most;
    total += turn_into_p(s, highest, at);
    // The chain: the next scores come when all of this Q tile's P is there.
    asm volatile("barrier.cta.sync %0, %1;" ::"r"(9 + tile), "n"(ROWS * GROUPS) : "memory");
    x += 1e-3f;
    y = y * 0.999f + total * 1e-9f;
  }
  const long long ended = clock64();
  if (row == 0) cycles[blockIdx.x * blockDim.x / ROWS + group] = ended - start;
  sink[blockIdx.x * blockDim.x + threadIdx.x] = total + highest;
}

// Says which call failed, and how, in place of figures; no further one of this process would do.
void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  printf("{\"failed\": \"%s: %s\"}\n", call, cudaGetErrorString(error));
  exit(0);
}
#define CHECK(call) check(call, #call)

template <int KEYS, bool EXCHANGE>
void measure(int tiles, int ctas) {
  const int threads = tiles * ROWS * 128 / KEYS, smem = tiles * ROWS * 128 * 2;
  const int groups = ctas * threads / ROWS;
  auto kernel = steps<KEYS, EXCHANGE>;
  cudaFuncAttributes found;
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
  CHECK(cudaFuncGetAttributes(&found, kernel));
  long long* cycles;
  float* sink;
  std::vector<long long> read(groups);
  CHECK(cudaMalloc(&cycles, sizeof(long long) * groups));
  CHECK(cudaMalloc(&sink, sizeof(float) * threads * ctas));
  double best = 1e30, sum = 0;
  constexpr int LAUNCHES = 5;
  for (int launch = 0; launch < LAUNCHES; ++launch) {
    kernel<<<ctas, threads, smem>>>(cycles, sink);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(read.data(), cycles, sizeof(long long) * groups, cudaMemcpyDeviceToHost));
    double mean = 0;
    for (long long one : read) mean += double(one) / STEPS / groups;
    best = mean < best ? mean : best;
    sum += mean / LAUNCHES;
  }
  printf("{\"threads\": %d, \"registers\": %d, \"local_bytes\": %d, \"cycles_a_step\": %.2f, "
         "\"mean_cycles_a_step\": %.2f}\n", threads, found.numRegs, int(found.localSizeBytes), best, sum);
}

// program: the device; program WAY Q_TILES CTAS: the figures of one, CTAs 0 for one on each SM.
int main(int count, char** given) {
  cudaDeviceProp device;
  CHECK(cudaGetDeviceProperties(&device, 0));
  if (count != 4) {
    printf("{\"device\": \"%s\", \"steps\": %d}\n", device.name, STEPS);
    return 0;
  }
  const std::string way = given[1];
  const int tiles = atoi(given[2]), asked = atoi(given[3]);
  const int ctas = asked ? asked : device.multiProcessorCount;
  if (way == "whole") measure<128, false>(tiles, ctas);
  if (way == "halves") measure<64, true>(tiles, ctas);
  if (way == "apart") measure<64, false>(tiles, ctas);
}
