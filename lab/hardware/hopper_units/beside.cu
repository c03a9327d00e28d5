// What loads and bulk sums do to each other on their way to L2: all SMs load boxes and add others up,
// each kind at its own pace, for a span of cycles. As a backward kernel does with Q, dO and dQ.
#include "boxes.cuh"

constexpr int KIB = 1024, BOX = 16 * KIB, BOX_ROWS = BOX / ROW_BYTES, RING = 4, SMS = 132;
constexpr long LOADED = 16l << 20, ADDED = 16l << 20;  // bytes; both stay in L2
constexpr int SMEM = (RING + 2) * BOX + KIB;

struct Pace {
  int load, sum;  // cycles from one box to the next; 0 as fast as they go, -1 for none
};
struct Counts {
  long long loads, latency, sums;
};

__device__ __forceinline__ bool due(long long start, long long done, int interval) {
  return now() - start >= done * interval;
}

// A warp for each kind. A load waits until its place is free; of sums two may still read their memory.
__global__ void __launch_bounds__(64) mixed(long span, Pace pace, const __grid_constant__ CUtensorMap map, float* to, Counts* out) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ uint64_t full[RING];
  const uint32_t data = (smem(memory) + 1023) / 1024 * 1024;
  for (int i = threadIdx.x; i < 2 * BOX / 4; i += blockDim.x)
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(data + RING * BOX + 4 * i), "f"(1.0f) : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  if (threadIdx.x == 0)
    for (int i = 0; i < RING; ++i) init_barrier(smem(&full[i]), 1);
  publish_barriers();
  const long long start = now();
  if (threadIdx.x == 0 && pace.load >= 0) {
    const long boxes = LOADED / BOX;
    long long issued = 0, done = 0, latency = 0, asked[RING];
    while (now() - start < span) {
      if (issued - done < RING && due(start, issued, pace.load)) {
        const int place = static_cast<int>(issued % RING);
        expect_bytes(smem(&full[place]), BOX);
        asked[place] = now();
        load_box(data + place * BOX, &map, static_cast<int>((blockIdx.x * 37 + issued) % boxes) * BOX_ROWS, smem(&full[place]));
        ++issued;
      }
      if (done < issued) {
        uint32_t there;
        asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(there) : "r"(smem(&full[done % RING])), "r"(static_cast<int>(done / RING & 1)) : "memory");
        if (there) latency += now() - asked[done % RING], ++done;
      }
    }
    while (done < issued) wait_barrier(smem(&full[done % RING]), done / RING & 1), ++done;
    out[blockIdx.x].loads = issued, out[blockIdx.x].latency = latency;
  }
  if (threadIdx.x == 32 && pace.sum >= 0) {
    const long pieces = ADDED / BOX;
    long long issued = 0;
    while (now() - start < span) {
      if (!due(start, issued, pace.sum)) continue;
      asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
      asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                       reinterpret_cast<char*>(to) + (blockIdx.x * 7 + issued) % pieces * BOX),
                   "r"(data + (RING + static_cast<int>(issued & 1)) * BOX), "r"(BOX)
                   : "memory");
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      ++issued;
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    out[blockIdx.x].sums = issued;
  }
}

void mixed_case(const CUtensorMap& map, float* to, Pace pace) {
  static Counts* out = nullptr;
  if (!out) CHECK(cudaMallocHost(&out, SMS * sizeof(Counts)));
  CHECK(cudaFuncSetAttribute(mixed, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM));
  constexpr long SPAN = 400000;
  std::vector<double> loads, latencies, sums;
  for (int i = -1; i < repeats(); ++i) {
    for (int cta = 0; cta < SMS; ++cta) out[cta] = {0, 0, 0};
    mixed<<<SMS, 64, SMEM>>>(SPAN, pace, map, to, out);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    double loaded = 0, latency = 0, added = 0;
    for (int cta = 0; cta < SMS; ++cta)
      loaded += out[cta].loads, latency += out[cta].latency, added += out[cta].sums;
    if (i < 0) continue;  // the first brings all of it to L2
    loads.push_back(loaded * BOX / SPAN / SMS), sums.push_back(added * BOX / SPAN / SMS);
    latencies.push_back(loaded ? latency / loaded : 0);
  }
  auto words = [](int interval) {
    return interval < 0 ? std::string("none") : interval ? "every " + std::to_string(interval) + " cycles" : std::string("at once");
  };
  const std::string name = "beside/loads " + words(pace.load) + ", sums " + words(pace.sum);
  if (pace.load >= 0) report(name + ", loaded", "bytes/clk/SM", "boxes of 16 KiB from L2, 4 in flight", loads);
  if (pace.load >= 0) report(name + ", latency", "cycles", "of a load", latencies);
  if (pace.sum >= 0) report(name + ", added", "bytes/clk/SM", "pieces of 16 KiB to L2, 2 read at a time", sums);
}

int main() {
  char *loaded, *added;
  CHECK(cudaMalloc(&loaded, LOADED));
  CHECK(cudaMalloc(&added, ADDED));
  CHECK(cudaMemset(loaded, 0, LOADED));
  CHECK(cudaMemset(added, 0, ADDED));
  const CUtensorMap map = rows_map(loaded, LOADED, BOX_ROWS);
  report_clock("beside before");
  for (int load : {-1, 2048, 1024, 768, 512, 0})
    for (int sum : {-1, 4096, 2048, 1536, 1200, 0})
      if (load >= 0 || sum >= 0) mixed_case(map, reinterpret_cast<float*>(added), {load, sum});
  report_clock("beside after");
}
