// The life of a CTA that is launched for one work tile: from the end of the one before it on its SM to
// its first instruction, through barriers, tensor maps and registers to the first operands, and from
// its last store to its end. Several rounds of CTAs of the kernel's shape; holds between loads and
// stores are random, so that after the first round the SMs are not in step.
#include "boxes.cuh"
#include "common.cuh"

#include <map>

constexpr int KIB = 1024, BOX_ROWS = 128, BOX = BOX_ROWS * ROW_BYTES, BARRIERS = 30, ROUNDS = 8;
constexpr int GROUP = 128, SMEM = 200 * KIB;
constexpr long L2_BYTES = 16L << 20, HBM_BYTES = 4L << 30;

struct Life {
  long long start, ready, registers, issued, first, last, stored, end;
  unsigned sm;
};
struct Shape {
  int threads, boxes, stores;  // boxes of 16 KiB: loaded, and stored at the end
  long long hold, spread;      // cycles between the two, at least, and at most beyond that
};

__device__ unsigned this_sm() {
  unsigned sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  return sm;
}
template <int MORE, int LESS>
__global__ void __launch_bounds__(MORE == 160 ? 512 : 384, 1)
    live(Life* out, Shape shape, const __grid_constant__ CUtensorMap k, const __grid_constant__ CUtensorMap q,
         const __grid_constant__ CUtensorMap o, int boxes, int first) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ uint64_t barriers[BARRIERS];
  Life life = {};
  life.start = now();
  const uint32_t data = (smem(memory) + 1023) / 1024 * 1024, full = smem(barriers);
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&k, &q, &o}) asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
    for (auto& barrier : barriers) init_barrier(smem(&barrier), 1);
  }
  publish_barriers();
  life.ready = now();
  const int at = (first + blockIdx.x * shape.boxes) % boxes;
  if (threadIdx.x / GROUP == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LESS));
    life.registers = now();
    if (threadIdx.x == 0) {
      for (int i = 0; i < shape.boxes; ++i) {
        const uint32_t barrier = full + 8 * (i > 0);
        if (i < 2) expect_bytes(barrier, i ? (shape.boxes - 1) * BOX : BOX);
        load_box(data + i * BOX, i ? &q : &k, (at + i) % boxes * BOX_ROWS, barrier);
      }
      life.issued = now();
      wait_barrier(full, 0);
      life.first = now();
      if (shape.boxes > 1) wait_barrier(full + 8, 0);
      life.last = now();
      const unsigned mixed = (blockIdx.x + 1) * 2654435761u;
      const long long until = life.last + shape.hold + (shape.spread ? (mixed ^ mixed >> 15) % shape.spread : 0);
      while (now() < until) {
      }
      life.stored = now();
      for (int i = 0; i < shape.stores; ++i)
        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&o), "r"(0),
                     "r"((at + i) % boxes * BOX_ROWS), "r"(data + i * BOX)
                     : "memory");
      asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
      life.end = now(), life.sm = this_sm();
      out[blockIdx.x] = life;
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MORE));
    wait_barrier(full, 0);
  }
}

using Field = long long (*)(const Life& life, const Life* before);

void lives(const Shape& shape, long bytes, char* buffer, int sms, const std::string& name) {
  const CUtensorMap map = rows_map(buffer, bytes, BOX_ROWS);
  const int ctas = sms * ROUNDS, boxes = bytes / BOX;
  static int first = 0;
  Life* out;
  CHECK(cudaMalloc(&out, ctas * sizeof(Life)));
  const auto kernel = shape.threads == 512 ? live<160, 24> : live<240, 24>;
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM));
  const struct {
    const char *what, *method;
    Field value;
    int rounds;  // 1: of the first CTA on each SM, 2: of the later ones
  } fields[] = {
      {"replaced", "end of a CTA to start of the next on its SM", [](const Life& x, const Life* b) { return x.start - b->end; }, 2},
      {"barriers", "30 barriers, three prefetches of tensor maps, the fence, all threads meet", [](const Life& x, const Life*) { return x.ready - x.start; }, 3},
      {"registers", "setmaxnreg of the warpgroup that loads", [](const Life& x, const Life*) { return x.registers - x.ready; }, 3},
      {"issue", "its loads", [](const Life& x, const Life*) { return x.issued - x.registers; }, 3},
      {"first box", "asked for to seen, 16 KiB", [](const Life& x, const Life*) { return x.first - x.registers; }, 3},
      {"last box", "the first asked for to the last seen", [](const Life& x, const Life*) { return x.last - x.registers; }, 3},
      {"stores", "asked for to read from shared memory", [](const Life& x, const Life*) { return x.end - x.stored; }, 3},
  };
  std::map<std::string, std::vector<double>> medians;
  for (int repeat = 0; repeat <= repeats(); ++repeat) {
    kernel<<<ctas, shape.threads, SMEM>>>(out, shape, map, map, map, boxes, first);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    first = (first + ctas * shape.boxes) % boxes;
    if (!repeat) continue;
    std::vector<Life> all(ctas);
    CHECK(cudaMemcpy(all.data(), out, ctas * sizeof(Life), cudaMemcpyDefault));
    std::map<unsigned, std::vector<Life>> by_sm;
    for (const Life& life : all) by_sm[life.sm].push_back(life);
    for (const auto& field : fields)
      for (int round : {1, 2}) {
        if (!(field.rounds & round)) continue;
        std::vector<double> found;
        for (auto& [sm, some] : by_sm) {
          std::sort(some.begin(), some.end(), [](const Life& a, const Life& b) { return a.start < b.start; });
          for (size_t i = round - 1; i < (round == 1 ? 1 : some.size()); ++i)
            found.push_back(field.value(some[i], i ? &some[i - 1] : nullptr));
        }
        std::sort(found.begin(), found.end());
        const char* rounds = field.rounds == 2 ? "" : round == 1 ? ", first round" : ", later rounds";
        medians[std::string(field.what) + rounds + "|" + field.method].push_back(found[found.size() / 2]);
      }
  }
  for (const auto& [what, values] : medians) {
    const size_t bar = what.find('|');
    report("start/" + name + ", " + what.substr(0, bar), "cycles", what.substr(bar + 1) + "; median over CTAs", values);
  }
  CHECK(cudaFree(out));
}

int main() {
  report_clock("starts before");
  int sms = 0;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  char* buffer;
  CHECK(cudaMalloc(&buffer, HBM_BYTES));
  CHECK(cudaMemset(buffer, 0, HBM_BYTES));
  for (int threads : {384, 512}) {
    const std::string shape = std::to_string(threads) + " threads, ";
    lives({threads, 1, 0, 4000, 4000}, L2_BYTES, buffer, sms, shape + "16 KiB from L2");
    lives({threads, 6, 4, 4000, 8000}, L2_BYTES, buffer, sms, shape + "96 KiB from L2, 64 KiB stored");
  }
  for (int boxes : {1, 2, 4, 6, 8})
    for (long long hold : {4000, 12000})
      lives({384, boxes, 4, hold, hold}, HBM_BYTES, buffer, sms,
            std::to_string(16 * boxes) + " KiB from device memory, 64 KiB stored, holds of " + std::to_string(hold) + " to " + std::to_string(2 * hold));
  lives({384, 6, 4, 12000, 0}, HBM_BYTES, buffer, sms, "96 KiB from device memory, 64 KiB stored, holds of 12000");
  report_clock("starts after");
}
