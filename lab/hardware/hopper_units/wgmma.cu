// wgmma: latency and rate by width, source of A, number of warpgroups and length of the chain; and
// both while the copy engine fills shared memory.
#include "boxes.cuh"
#include "common.cuh"
#include "products.cuh"

constexpr int KIB = 1024, A_BYTES = 16 * KIB, B_AT = 48 * KIB, RING_AT = 112 * KIB;
constexpr int BOX_ROWS = 128, BOX = BOX_ROWS * ROW_BYTES, STAGES = 4, SMEM = RING_AT + STAGES * BOX + KIB;
constexpr int most_threads(int width) { return width > 128 ? 384 : 416; }  // registers for wide ones
constexpr long L2_BYTES = 16L << 20;
constexpr int FEW = 8, LONG = 32;  // wgmmas of a chain

// K-major operand swizzled by 128 bytes: 8 rows are 1,024 bytes, 64 columns a slab.
__device__ __forceinline__ uint64_t operand(uint32_t at) {
  return (at & 0x3ffff) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

struct Loading {
  int pace;  // cycles between boxes; negative: none are loaded
  long long* boxes;
};

__device__ void load_until_done(const CUtensorMap& map, uint32_t ring, uint32_t full, volatile int* done,
                                int groups, Loading loading) {
  long long next = now();
  int count = 0;
  for (; *done < groups; ++count) {
    const int stage = count % STAGES;
    if (count >= STAGES) wait_barrier(full + 8 * stage, count / STAGES & 1 ^ 1);
    if (loading.pace) {
      while (now() < next) {
      }
      next = max(next + loading.pace, now());
    }
    expect_bytes(full + 8 * stage, BOX);
    load_box(ring + stage * BOX, &map, (count + blockIdx.x * 7) % static_cast<int>(L2_BYTES / BOX) * BOX_ROWS,
             full + 8 * stage);
  }
  for (int i = max(0, count - STAGES); i < count; ++i) wait_barrier(full + 8 * (i % STAGES), i / STAGES & 1);
  loading.boxes[blockIdx.x] = count;
}

template <int WIDTH, bool REGISTERS, int CHAIN>
__global__ void __launch_bounds__(most_threads(WIDTH), 1)
    chains(long n, Stamp* out, int groups, const __grid_constant__ CUtensorMap map, Loading loading, float* sink) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ uint64_t full[STAGES];
  __shared__ int done;
  const uint32_t data = (smem(memory) + 1023) / 1024 * 1024;
  unsigned char* bytes = memory + (data - smem(memory));
  for (int i = threadIdx.x; i < RING_AT / 4; i += blockDim.x)  // bf16 near 1, either sign
    reinterpret_cast<uint32_t*>(bytes)[i] = (i * 2654435761u & 0x807f807f) | 0x3f003f00;
  if (threadIdx.x == 0) {
    done = 0;
    for (int s = 0; s < STAGES; ++s) init_barrier(smem(&full[s]), 1);
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  publish_barriers();
  const int group = threadIdx.x / 128;
  if (group == groups) {
    if (threadIdx.x % 128 == 0 && loading.pace >= 0)
      load_until_done(map, data + RING_AT, smem(full), &done, groups, loading);
    return;
  }
  float d[WIDTH / 2];
#pragma unroll
  for (int i = 0; i < WIDTH / 2; ++i) d[i] = 0;
  const uint32_t from_registers[4] = {0x3f803f00u ^ threadIdx.x << 31, 0x3f003f80u, 0xbf803f00u, 0x3f80bf00u};
  const long long start = now();
#pragma unroll 1
  for (long i = 0; i < n; ++i) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < CHAIN; ++k) {
      const uint32_t slab = k / 4 % 2, column = k % 4 * 32;
      const uint64_t b = operand(data + B_AT + slab * WIDTH * ROW_BYTES + column);
      if constexpr (REGISTERS) {
        Product<WIDTH, true>::issue(d, from_registers, b);
      } else {
        Product<WIDTH, false>::issue(d, operand(data + group * A_BYTES + slab * 8 * KIB + column), b);
      }
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  }
  mark(out, start);
  if (threadIdx.x % 128 == 0) atomicAdd(&done, 1);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < WIDTH / 2; ++i) sum += d[i];
  if (sum == 12345.678f) *sink = sum;
}

CUtensorMap map;
Loading none{-1, nullptr};

template <int WIDTH, bool REGISTERS, int CHAIN>
std::vector<double> step(int groups) {
  return slopes(launcher(chains<WIDTH, REGISTERS, CHAIN>, 1, 128 * groups, SMEM, groups, map, none,
                         (float*)nullptr),
                64, 256);
}
std::string shape(int width, bool registers) {
  return "m64n" + std::to_string(width) + "k16, A from " + (registers ? "registers" : "shared memory");
}
template <int WIDTH, bool REGISTERS>
void cases() {
  const std::string name = shape(WIDTH, REGISTERS);
  const auto waited = [&](int chain, std::vector<double> values) {
    report("latency/" + name + ", chain of " + std::to_string(chain), "cycles",
           "fence, chain on one accumulator, commit, wait_group 0", values);
  };
  waited(1, step<WIDTH, REGISTERS, 1>(1));
  waited(2, step<WIDTH, REGISTERS, 2>(1));
  waited(4, step<WIDTH, REGISTERS, 4>(1));
  for (int groups : {1, 2, 3}) {
    const std::vector<double> few = step<WIDTH, REGISTERS, FEW>(groups);
    std::vector<double> interval = step<WIDTH, REGISTERS, LONG>(groups);
    if (groups == 1) waited(FEW, few), waited(LONG, interval);
    for (size_t i = 0; i < few.size(); ++i) interval[i] = (interval[i] - few[i]) / ((LONG - FEW) * groups);
    const std::string of = name + ", warpgroups " + std::to_string(groups);
    report("interval/" + of, "cycles", "of the SM per wgmma: chains of 32 less chains of 8", interval);
    report("waited/" + of, "cycles", "of the SM per wgmma: chains of 8, each waited for",
           scaled(few, 1.0 / (FEW * groups)));
  }
}
// Both rates while boxes are loaded at a pace.
template <int WIDTH, bool REGISTERS>
void while_loading(int groups, int ctas) {
  long long* boxes = nullptr;
  CHECK(cudaMallocHost(&boxes, MOST_CTAS * sizeof(long long)));
  for (int pace : {1024, 640, 384, 256, 0}) {
    const Run run = launcher(chains<WIDTH, REGISTERS, LONG>, ctas, 128 * groups + WARP, SMEM, groups, map,
                             Loading{pace, boxes}, (float*)nullptr);
    std::vector<double> interval, rates;
    run(400);
    for (int i = 0; i < repeats(); ++i) {
      const double short_run = run(200);
      const double short_boxes = boxes[0], cycles = run(800) - short_run;
      interval.push_back(cycles / (600 * LONG * groups));
      rates.push_back((boxes[0] - short_boxes) * BOX / cycles);
    }
    const std::string name = "loading/" + shape(WIDTH, REGISTERS) + ", warpgroups " + std::to_string(groups) + ", " +
                             (ctas == 1 ? "1 SM" : "all SMs") + ", a box of 16 KiB per " + std::to_string(pace) + " cycles";
    report(name + ", interval", "cycles", "of the SM per wgmma, chains of 32", interval);
    report(name + ", rate", "bytes/clk/SM", "arrived meanwhile from L2", rates);
  }
  CHECK(cudaFreeHost(boxes));
}

int main() {
  report_clock("wgmma before");
  void* memory;
  CHECK(cudaMalloc(&memory, L2_BYTES));
  CHECK(cudaMemset(memory, 0, L2_BYTES));
  map = rows_map(memory, L2_BYTES, BOX_ROWS);
  cases<8, false>(), cases<16, false>(), cases<32, false>(), cases<64, false>(), cases<96, false>();
  cases<128, false>(), cases<176, false>(), cases<192, false>(), cases<256, false>();
  cases<8, true>(), cases<16, true>(), cases<32, true>(), cases<64, true>(), cases<96, true>();
  cases<128, true>(), cases<176, true>(), cases<192, true>(), cases<256, true>();
  for (int groups : {1, 2, 3})
    while_loading<64, false>(groups, 1), while_loading<128, false>(groups, 1), while_loading<128, true>(groups, 1);
  int sms = 0;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  while_loading<128, true>(2, sms);
  report_clock("wgmma after");
}
