// The SM clock over time under a load of all SMs: an idle loop, wgmma on zeros or on random numbers,
// and that with what an attention kernel does besides. One line per load; its clock every 0.25 ms for 20 ms, then every 10 ms.
// "energy" as its argument: loads that tell what an operation of each kind takes, on normal numbers.
#include <cstring>
#include <ctime>
#include <tuple>

#include "boxes.cuh"
#include "common.cuh"
#include "products.cuh"

constexpr int KIB = 1024, WIDTH = 128, CHAIN = 32, GROUPS = 2, A_BYTES = 16 * KIB, B_AT = 32 * KIB;
constexpr int RING_AT = 64 * KIB, BOX_ROWS = 128, BOX = BOX_ROWS * ROW_BYTES, STAGES = 4;
constexpr int SMEM = RING_AT + STAGES * BOX + KIB, LOADER = 3, MATH = 2, THREADS = 416;
constexpr long BYTES = 1L << 30, SOON_NS = 250000, SOON = 80, LATER_NS = 10000000;  // 20 ms closely
constexpr int MOST_SAMPLES = 1024, MATH_STEPS = 64, MATH_COLUMNS = 8;

struct Sample {
  long long ns, cycles, chains, rounds, boxes;
};
enum Data { ZEROS, RANDOM, NORMAL };  // RANDOM: all exponents alike
struct Load {
  const char* name;
  bool products;
  int data;
  bool math;
  int pace;        // cycles between boxes of 16 KiB; 0: none
  long footprint;  // bytes that they are read from
  int gap;         // cycles without products after each chain
};

__device__ uint32_t normal_bf16(uint32_t bits) {  // Box and Muller
  const float radius = sqrtf(-2 * logf((bits >> 16 | 1) / 65536.0f));
  return __float_as_uint(radius * cospif((bits & 0xffff) / 32768.0f)) >> 16;
}
__device__ __forceinline__ uint64_t operand(uint32_t at) {
  return (at & 0x3ffff) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

__global__ void __launch_bounds__(THREADS, 1)
    burn(long long ns, Load load, const __grid_constant__ CUtensorMap map, Sample* samples, float* sink) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ uint64_t full[STAGES];
  __shared__ volatile bool goes_on[GROUPS];
  __shared__ volatile long long rounds, loaded;  // of the exponentials' loop, of boxes
  if (threadIdx.x == 0) rounds = loaded = 0;
  const uint32_t data = (smem(memory) + 1023) / 1024 * 1024;
  unsigned char* bytes = memory + (data - smem(memory));
  for (int i = threadIdx.x; i < RING_AT / 4; i += blockDim.x) {
    const uint32_t mixed = (i + 1) * 2654435761u, bits = mixed ^ mixed >> 15;
    uint32_t pair = load.data == RANDOM ? (bits & 0x80ff80ff) | 0x3f003f00 : 0;
    if (load.data == NORMAL) pair = normal_bf16(bits) << 16 | normal_bf16(bits * 2654435761u + 1);
    reinterpret_cast<uint32_t*>(bytes)[i] = pair;
  }
  if (threadIdx.x == 0)
    for (auto& barrier : full) init_barrier(smem(&barrier), 1);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  publish_barriers();
  const int group = threadIdx.x / 128;
  const long long until = nanoseconds() + ns;
  if (group == LOADER) {
    if (threadIdx.x % 128 || !load.pace) return;
    const int boxes = load.footprint / BOX;
    long long next = now();
    int count = 0, box = blockIdx.x;
    for (; nanoseconds() < until; ++count, box = (box + gridDim.x) % boxes) {
      const int stage = count % STAGES;
      if (count >= STAGES) wait_barrier(smem(full) + 8 * stage, count / STAGES & 1 ^ 1);
      while (now() < next) {
      }
      next = max(next + load.pace, now());
      expect_bytes(smem(full) + 8 * stage, BOX);
      load_box(data + RING_AT + stage * BOX, &map, box * BOX_ROWS, smem(full) + 8 * stage);
      loaded = count;
    }
    for (int i = max(0, count - STAGES); i < count; ++i) wait_barrier(smem(full) + 8 * (i % STAGES), i / STAGES & 1);
    return;
  }
  if (group == MATH) {  // 3 FMAs, 2 maxima and an exponential, as a softmax step has them
    if (!load.math) return;
    float x[8], y[8], z[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) x[c] = c + 0.37f * threadIdx.x, y[c] = 0.01f * c, z[c] = 0.3f * c;
    for (long long round = 0; nanoseconds() < until; rounds = ++round) {
#pragma unroll 1
      for (int i = 0; i < MATH_STEPS; ++i) {
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(z[c]) : "f"(y[c]));
          x[c] = fmaf(x[c], 0.99f, 0.37f), y[c] = fmaf(x[c], -0.013f, z[c]), z[c] = fmaf(z[c], y[c], x[c]);
          x[c] = fmaxf(x[c], z[c]), y[c] = fminf(y[c], 0.5f);
        }
      }
    }
    float sum = 0;
    for (int c = 0; c < 8; ++c) sum += x[c] + y[c] + z[c];
    if (sum == 12345.678f) *sink = sum;
    return;
  }
  float d[WIDTH / 2];
  long long next_sample = nanoseconds(), chains = 0;
  int count = 0;
  while (true) {  // the warps of a warpgroup end together
    if (threadIdx.x % 128 == 0) {
      const long long time = nanoseconds();
      goes_on[group] = time < until;
      if (blockIdx.x == 0 && group == 0 && time >= next_sample && count < MOST_SAMPLES)
        samples[count++] = {time, now(), chains, rounds, loaded}, next_sample += count < SOON ? SOON_NS : LATER_NS;
    }
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
    const bool again = goes_on[group];
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
    if (!again) break;
    if (!load.products) continue;
#pragma unroll
    for (int i = 0; i < WIDTH / 2; ++i) d[i] = 0;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < CHAIN; ++k) {
      const uint32_t slab = k / 4 % 2, column = k % 4 * 32;
      Product<WIDTH, false>::issue(d, operand(data + group * A_BYTES + slab * 8 * KIB + column),
                                   operand(data + B_AT + slab * WIDTH * ROW_BYTES + column));
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    ++chains;
    for (const long long start = now(); now() - start < load.gap;) {
    }
    float sum = 0;
#pragma unroll
    for (int i = 0; i < WIDTH / 2; ++i) sum += d[i];
    if (sum == 12345.678f) *sink = sum;
  }
}

long long unix_ns() {
  timespec time;
  clock_gettime(CLOCK_REALTIME, &time);
  return time.tv_sec * 1000000000ll + time.tv_nsec;
}

int main(int count_of_arguments, char** arguments) {
  int sms = 0;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  char* buffer;
  Sample* samples;
  CHECK(cudaMalloc(&buffer, BYTES));
  std::vector<uint16_t> random(BYTES / 2);
  uint32_t state = 1;
  for (auto& word : random) word = ((state = state * 1664525u + 1013904223u) >> 16 & 0x80ff) | 0x3f00;
  CHECK(cudaMemcpy(buffer, random.data(), BYTES, cudaMemcpyDefault));
  CHECK(cudaMallocHost(&samples, MOST_SAMPLES * sizeof(Sample)));
  CHECK(cudaFuncSetAttribute(burn, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM));
  const CUtensorMap map = rows_map(buffer, BYTES, BOX_ROWS);
  struct Timed {
    Load load;
    double seconds;
  };
  const std::vector<Timed> clocks = {
      {{"idle loop", false, ZEROS, false, 0, 0, 0}, 0.4},
      {{"products of zeros", true, ZEROS, false, 0, 0, 0}, 1.0},
      {{"products of random numbers", true, RANDOM, false, 0, 0, 0}, 0.2},
      {{"products of random numbers", true, RANDOM, false, 0, 0, 0}, 1.0},
      {{"products of zeros, gaps of 6,144 cycles", true, ZEROS, false, 0, 0, 6144}, 0.4},
      {{"products of random numbers, gaps of 2,048 cycles", true, RANDOM, false, 0, 0, 2048}, 0.6},
      {{"products of random numbers, gaps of 6,144 cycles", true, RANDOM, false, 0, 0, 6144}, 0.6},
      {{"products of random numbers, softmax arithmetic", true, RANDOM, true, 0, 0, 0}, 1.0},
      {{"products of random numbers, softmax arithmetic, boxes from L2", true, RANDOM, true, 640, 16 << 20, 0}, 1.0},
      {{"products of random numbers, boxes from L2", true, RANDOM, false, 640, 16 << 20, 0}, 0.6},
      {{"products of random numbers, boxes from device memory", true, RANDOM, false, 1024, BYTES, 0}, 0.6},
      {{"products of random numbers", true, RANDOM, false, 0, 0, 0}, 3.0},
  };
  const std::vector<Timed> energies = {
      {{"idle loop", false, ZEROS, false, 0, 0, 0}, 0.4},
      {{"softmax arithmetic", false, ZEROS, true, 0, 0, 0}, 0.4},
      {{"boxes from L2", false, ZEROS, false, 640, 16 << 20, 0}, 0.4},
      {{"boxes from device memory", false, ZEROS, false, 1024, BYTES, 0}, 0.4},
      {{"products of zeros", true, ZEROS, false, 0, 0, 0}, 0.6},
      {{"products of zeros, gaps of 2,048 cycles", true, ZEROS, false, 0, 0, 2048}, 0.6},
      {{"products, gaps of 28,672 cycles", true, NORMAL, false, 0, 0, 28672}, 0.5},
      {{"products, gaps of 14,336 cycles", true, NORMAL, false, 0, 0, 14336}, 0.5},
      {{"products, gaps of 6,144 cycles", true, NORMAL, false, 0, 0, 6144}, 0.5},
      {{"products, gaps of 3,072 cycles", true, NORMAL, false, 0, 0, 3072}, 0.6},
      {{"products, gaps of 2,048 cycles", true, NORMAL, false, 0, 0, 2048}, 0.6},
      {{"products", true, NORMAL, false, 0, 0, 0}, 0.6},
      {{"products, gaps of 14,336 cycles, softmax arithmetic", true, NORMAL, true, 0, 0, 14336}, 0.5},
      {{"products, gaps of 2,048 cycles, softmax arithmetic", true, NORMAL, true, 0, 0, 2048}, 0.6},
      {{"products, gaps of 2,048 cycles, softmax arithmetic, boxes from L2", true, NORMAL, true, 1024, 16 << 20, 2048}, 0.6},
      {{"products, softmax arithmetic, boxes from L2", true, NORMAL, true, 1024, 16 << 20, 0}, 0.6},
  };
  const bool energy = count_of_arguments > 1 && !std::strcmp(arguments[1], "energy");
  for (const auto& [load, seconds] : energy ? energies : clocks) {
    std::fill(samples, samples + MOST_SAMPLES, Sample{});
    const long long begin = unix_ns();
    burn<<<sms, THREADS, SMEM>>>((long long)(seconds * 1e9), load, map, samples, nullptr);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    const long long end = unix_ns();
    std::printf("{\"load\": \"%s\", \"seconds\": %g, \"begin_ns\": %lld, \"end_ns\": %lld, \"ms\": [", load.name, seconds,
                begin, end);
    int count = 0;
    while (count < MOST_SAMPLES && samples[count].ns) ++count;
    for (int i = 1; i < count; ++i) std::printf("%s%.1f", i > 1 ? ", " : "", 1e-6 * (samples[i].ns - samples[0].ns));
    std::printf("], \"mhz\": [");
    for (int i = 1; i < count; ++i)
      std::printf("%s%.1f", i > 1 ? ", " : "", 1e3 * (samples[i].cycles - samples[i - 1].cycles) / (samples[i].ns - samples[i - 1].ns));
    std::printf("], \"tflops\": [");
    const double flops = 2.0 * 64 * WIDTH * 16 * CHAIN * GROUPS * sms;
    for (int i = 1; i < count; ++i)
      std::printf("%s%.1f", i > 1 ? ", " : "", 1e-3 * flops * (samples[i].chains - samples[i - 1].chains) / (samples[i].ns - samples[i - 1].ns));
    const double exponentials = 128.0 * MATH_STEPS * MATH_COLUMNS * sms, bytes = 1.0 * BOX * sms;
    for (const auto& [what, scale, value] :
         {std::tuple{"exponentials_per_ns", exponentials, &Sample::rounds}, {"bytes_per_ns", bytes, &Sample::boxes}}) {
      std::printf("], \"%s\": [", what);
      for (int i = 1; i < count; ++i)
        std::printf("%s%.1f", i > 1 ? ", " : "", scale * (samples[i].*value - samples[i - 1].*value) / (samples[i].ns - samples[i - 1].ns));
    }
    std::printf("]}\n");
    std::fflush(stdout);
    timespec pause = {0, energy ? 300000000 : 100000000};
    nanosleep(&pause, nullptr);
  }
}
