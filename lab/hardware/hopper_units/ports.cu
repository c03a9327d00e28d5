// What products that read their operands from shared memory and a warpgroup's own accesses do to each
// other: loads that wait for one another, loads and stores in a row, a store that is shown to the
// async proxy, a barrier's phase that is over, while others multiply. The products are those of a
// backward kernel: K Q^T (K-major operands), dS K (both summed across rows), P^T dO (A in registers).
#include "common.cuh"
#include "products.cuh"

constexpr int KIB = 1024, A_BYTES = 16 * KIB, B_AT = 32 * KIB, PLACES_AT = 96 * KIB, PLACES = 16 * KIB;
constexpr int SMEM = PLACES_AT + PLACES + KIB, CHAIN = 32, CHAINS = 4, ROW_BYTES = 128, IN_A_ROW = 8;
constexpr double LEAST_CYCLES = 4e5;
constexpr long ADDED = 16l << 20;  // bytes of L2 that sums are added to
enum Access { LATENCY, LOADS, STORES, MATRICES, SHOWN, PHASE, BULK_SUMS, VECTOR_SUMS };
struct Kind {
  const char *name, *method;
  int bytes;  // of a warp
};
constexpr Kind KINDS[] = {
    {"a load's latency", "4-byte loads of a warp, each at the address that the last one brought", 128},
    {"16-byte loads", "8 in a row, then used", 4096},
    {"16-byte stores", "8 in a row", 4096},
    {"stmatrix", "8 of four 8 x 8 matrices in a row", 4096},
    {"a store shown", "a 16-byte store, fence.proxy.async and a barrier of the warpgroup", 512},
    {"a phase that is over", "mbarrier.try_wait", 0},
    {"bulk sums", "16 KiB of shared memory added to L2, of two one may still be read", 4096},
    {"vector sums", "8 red.global.add.v4.f32 in a row, 512 bytes of L2 for each warp", 4096},
};

// Operands swizzled by 128 bytes: 8 rows are 1,024 bytes. K-major, or summed across rows: runs of 64
// columns lie `run` bytes apart.
__device__ __forceinline__ uint64_t operand(uint32_t at, int run) {
  return (at & 0x3ffff) >> 4 | static_cast<uint64_t>(run / 16) << 16 | 64ull << 32 | 1ull << 62;
}

template <int WIDTH, bool REGISTERS, bool ACROSS>
__device__ void multiply(uint32_t data, volatile int* done, long long* count, float* sink) {
  const int group = threadIdx.x / 128;
  float d[WIDTH / 2];
#pragma unroll
  for (int i = 0; i < WIDTH / 2; ++i) d[i] = 0;
  const uint32_t from_registers[4] = {0x3f803f00u ^ threadIdx.x << 31, 0x3f003f80u, 0xbf803f00u, 0x3f80bf00u};
  long long chains = 0;
  for (int ended = 0; !ended; chains += CHAINS) {
#pragma unroll 1
    for (int chain = 0; chain < CHAINS; ++chain) {
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int k = 0; k < CHAIN; ++k) {
        // 16 of 64 columns, then the next run; or 16 of 128 rows.
        const int step = ACROSS ? k % 8 * 16 * ROW_BYTES : k % 4 * 32, run = ACROSS ? 0 : k / 4 % 2;
        const uint64_t b = operand(data + B_AT + step + run * WIDTH * ROW_BYTES, ACROSS ? 16 * KIB : 16);
        if constexpr (REGISTERS) {
          Product<WIDTH, true, ACROSS>::issue(d, from_registers, b);
        } else {
          const uint32_t a = data + group * A_BYTES + step + run * 8 * KIB;
          Product<WIDTH, false, ACROSS>::issue(d, operand(a, ACROSS ? 16 * KIB : 16), b);
        }
      }
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    }
    ended = *done;  // all four warps must see the same
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %0, 0;\nbarrier.red.or.pred q, %1, 128, p;\nselp.u32 %0, 1, 0, q;\n}"
                 : "+r"(ended) : "r"(2 + group) : "memory");
  }
  if (threadIdx.x % 128 == 0 && blockIdx.x == 0) count[group] = chains;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < WIDTH / 2; ++i) sum += d[i];
  if (sum == 12345.678f) *sink = sum;
}

template <Access ACCESS>
__device__ __forceinline__ void reach(uint32_t places, uint32_t barrier, char* sums, long i, uint32_t& at, uint32_t (&x)[4]) {
  const uint32_t mine = places + threadIdx.x % 128 * 16;
  if constexpr (ACCESS == LATENCY) asm volatile("ld.shared.b32 %0, [%0];" : "+r"(at)::"memory");
  if constexpr (ACCESS == LOADS) {
    uint32_t y[IN_A_ROW][4];
#pragma unroll
    for (int i = 0; i < IN_A_ROW; ++i)
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(y[i][0]), "=r"(y[i][1]), "=r"(y[i][2]), "=r"(y[i][3]) : "r"(mine + i * 2 * KIB) : "memory");
#pragma unroll
    for (int i = 0; i < IN_A_ROW; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] ^= y[i][j];
  }
  if constexpr (ACCESS == STORES || ACCESS == MATRICES || ACCESS == SHOWN)
#pragma unroll
    for (int i = 0; i < (ACCESS == SHOWN ? 1 : IN_A_ROW); ++i)
      if constexpr (ACCESS == MATRICES)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(mine + i * 2 * KIB), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
      else
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(mine + i * 2 * KIB), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
  if constexpr (ACCESS == SHOWN) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync 1, 128;" ::: "memory");
  }
  if constexpr (ACCESS == PHASE) wait_barrier(barrier, 1);
  char* const piece = sums + (blockIdx.x * 7 + i) % (ADDED / PLACES) * PLACES;
  if constexpr (ACCESS == BULK_SUMS)
    if (threadIdx.x % 128 == 0) {
      asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
      asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(piece), "r"(places), "r"(PLACES) : "memory");
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
  if constexpr (ACCESS == VECTOR_SUMS)
#pragma unroll
    for (int k = 0; k < IN_A_ROW; ++k)
      asm volatile("red.global.add.v4.f32 [%0], {%1, %1, %1, %1};" ::"l"(piece + k * 2 * KIB + threadIdx.x % 128 * 16), "f"(1.0f) : "memory");
}

// The first `groups` warpgroups multiply for as long as the last one goes on, whose span is stamped.
template <Access ACCESS, int WIDTH, bool REGISTERS, bool ACROSS>
__global__ void __launch_bounds__(384, 1) beside(long n, Stamp* out, int groups, int warps, long long* count, char* sums, float* sink) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ int done;
  __shared__ uint64_t over;
  const uint32_t data = (smem(memory) + 1023) / 1024 * 1024, places = data + PLACES_AT;
  unsigned char* bytes = memory + (data - smem(memory));
  for (int i = threadIdx.x; i < PLACES_AT / 4; i += blockDim.x)  // bf16 near 1, either sign
    reinterpret_cast<uint32_t*>(bytes)[i] = (i * 2654435761u & 0x807f807f) | 0x3f003f00;
  for (int i = threadIdx.x; i < PLACES / 4; i += blockDim.x)  // addresses of loads that wait for one another
    reinterpret_cast<uint32_t*>(bytes + PLACES_AT)[i] = places + (i * 4 + 4096) % PLACES;
  if (threadIdx.x == 0) done = 0, init_barrier(smem(&over), 1);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  publish_barriers();
  if (threadIdx.x / 128 < groups) return multiply<WIDTH, REGISTERS, ACROSS>(data, &done, count, sink);
  if (threadIdx.x % 128 / WARP >= warps) return;
  uint32_t at = places + threadIdx.x % 128 * 4, x[4] = {threadIdx.x, 1, 2, 3};
  const long long from = now();
  while (now() - from < 4000) {  // until products are under way
  }
  const long long start = now();
#pragma unroll 1
  for (long i = 0; i < n; ++i) reach<ACCESS>(places, smem(&over), sums, i, at, x);
  if constexpr (ACCESS == BULK_SUMS) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  mark(out, start);
  if (threadIdx.x % 128 == 0) done = 1;
  if constexpr (ACCESS == BULK_SUMS) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  if ((at ^ x[0] ^ x[1] ^ x[2] ^ x[3]) == 0x12345678) *sink = 1;
}

template <Access ACCESS, int WIDTH, bool REGISTERS, bool ACROSS>
void one_case(int groups, int warps) {
  static long long* count = nullptr;
  static char* sums = nullptr;
  static int sms = 0;
  if (!count) {
    CHECK(cudaMallocHost(&count, 2 * sizeof(long long)));
    CHECK(cudaMalloc(&sums, ADDED));
    CHECK(cudaMemset(sums, 0, ADDED));
    CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  }
  const bool all = ACCESS == BULK_SUMS || ACCESS == VECTOR_SUMS;
  const Run run = launcher(beside<ACCESS, WIDTH, REGISTERS, ACROSS>, all ? sms : 1, 128 * groups + 128, SMEM, groups, warps, count, sums,
                           (float*)nullptr);
  std::vector<double> cycles, intervals;
  // As many as last for a hundred of the multiplying loop's rounds, which is what is counted.
  const long less = static_cast<long>(LEAST_CYCLES / run(500) * 500) + 100;
  run(4 * less);
  for (int i = 0; i < repeats(); ++i) {
    const double short_run = run(less);
    const double few = count[0];
    const double more = run(4 * less) - short_run;
    cycles.push_back(more / (3.0 * less));
    intervals.push_back(more / ((count[0] - few) * CHAIN * groups));
  }
  const Kind kind = KINDS[ACCESS];
  const std::string products = groups ? "m64n" + std::to_string(WIDTH) + "k16, A from " + (REGISTERS ? "registers" : "shared memory") +
                                            (ACROSS ? ", across rows" : "") + ", warpgroups " + std::to_string(groups)
                                      : "nothing";
  const std::string name = std::string("ports/") + kind.name + (all ? " of all SMs" : "") + ", warps " + std::to_string(warps) +
                           ", beside " + products;
  report(name + ", time", "cycles", kind.method, cycles);
  if (groups) report(name + ", interval", "cycles", "of the SM per wgmma, meanwhile", intervals);
}
template <Access ACCESS, int WIDTH, bool REGISTERS, bool ACROSS>
void cases(int warps) {
  for (int groups : {1, 2}) one_case<ACCESS, WIDTH, REGISTERS, ACROSS>(groups, warps);
}
template <Access ACCESS>
void kinds(int warps) {
  one_case<ACCESS, 64, false, false>(0, warps);
  cases<ACCESS, 64, false, false>(warps), cases<ACCESS, 64, false, true>(warps), cases<ACCESS, 128, false, false>(warps);
  cases<ACCESS, 64, true, true>(warps), cases<ACCESS, 128, true, true>(warps);
}

int main() {
  report_clock("ports before");
  kinds<LATENCY>(1), kinds<LATENCY>(4), kinds<PHASE>(4), kinds<SHOWN>(4);
  kinds<BULK_SUMS>(1), kinds<VECTOR_SUMS>(4);
  for (int warps : {1, 4}) kinds<LOADS>(warps), kinds<STORES>(warps), kinds<MATRICES>(warps);
  report_clock("ports after");
}
