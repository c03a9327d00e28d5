// What it takes to load tiles whose rows begin inside a sector of memory: 64 rows of a head of some
// columns, in boxes of 64 columns, from L2, on all SMs. A head lies alone, so that rows begin in turns
// at a sector and in its middle where its columns are an odd multiple of 8, or beside a second one,
// all of whose rows begin in the middle.
#include "boxes.cuh"

constexpr int KIB = 1024, TILE_ROWS = 64, RUN_COLUMNS = 64, RING = 3, MOST_RUNS = 4;
constexpr int BOX = TILE_ROWS * ROW_BYTES, SMEM = RING * MOST_RUNS * BOX + KIB;
constexpr long BYTES = 16l << 20;
const char* const WHERE[] = {"of two heads the first", "of two heads the second", "a head alone"};

CUtensorMap columns_map(char* memory, long pitch, long rows, int columns) {
  static Encode encode = nullptr;
  if (!encode) {
    cudaDriverEntryPointQueryResult found;
    CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void**)&encode, 12000, cudaEnableDefault, &found));
  }
  CUtensorMap map;
  const cuuint64_t sizes[] = {(cuuint64_t)columns, (cuuint64_t)rows}, strides[] = {(cuuint64_t)pitch};
  const cuuint32_t box[] = {RUN_COLUMNS, TILE_ROWS}, steps[] = {1, 1};
  if (encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, memory, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)) {
    std::fprintf(stderr, "no tensor map\n");
    std::exit(1);
  }
  return map;
}
__device__ __forceinline__ void load_columns(uint32_t to, const CUtensorMap* map, int column, int row, uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
               "l"(map), "r"(column), "r"(row), "r"(barrier)
               : "memory");
}
// from: the first column of the first box, 0 or 8 in front of the tensor's.
__global__ void tiles(long n, Stamp* out, const __grid_constant__ CUtensorMap map, int count, int runs, int from) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ uint64_t full[RING];
  const uint32_t data = (smem(memory) + 1023) / 1024 * 1024;
  if (threadIdx.x == 0)
    for (int s = 0; s < RING; ++s) init_barrier(smem(&full[s]), 1);
  publish_barriers();
  const long long start = now();
  for (long i = 0; i < n + RING && threadIdx.x == 0; ++i) {
    const int place = static_cast<int>(i % RING);
    if (i >= RING) wait_barrier(smem(&full[place]), i / RING & 1 ^ 1);
    if (i >= n) continue;
    expect_bytes(smem(&full[place]), runs * BOX);
    const int row = static_cast<int>((blockIdx.x * 37 + i) % count) * TILE_ROWS;
    for (int run = 0; run < runs; ++run)
      load_columns(data + (place * MOST_RUNS + run) * BOX, &map, from + run * RUN_COLUMNS, row, smem(&full[place]));
  }
  mark(out, start);
}

void rows_case(char* memory, int columns, int where, bool earlier, int ctas) {
  const long pitch = 2l * columns * (where == 2 ? 1 : 2), rows = BYTES / pitch - 1;
  const CUtensorMap map = columns_map(memory + (where == 1 ? 2 * columns : 0), pitch, rows, columns);
  const int from = earlier ? -8 : 0, runs = (columns - from + RUN_COLUMNS - 1) / RUN_COLUMNS;
  const std::vector<double> cycles = slopes(
      launcher(tiles, ctas, WARP, SMEM, map, static_cast<int>(rows / TILE_ROWS), runs, from), 50, 400);
  report("rows/" + std::to_string(columns) + " columns, " + WHERE[where] + (earlier ? ", 8 columns earlier" : "") +
             (ctas == 1 ? ", 1 SM" : ", all SMs"),
         "cycles", "64 rows from L2, three tiles in flight", cycles);
}

int main() {
  char* memory;
  CHECK(cudaMalloc(&memory, BYTES + KIB));
  CHECK(cudaMemset(memory, 0, BYTES + KIB));
  int sms = 0;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  report_clock("rows before");
  for (int ctas : {sms, 1})
    for (int columns : {64, 72, 80, 96, 104, 112, 128, 136, 144, 168, 176, 184, 192, 200, 208, 216, 224, 232, 240, 248, 256})
      for (int where : {0, 1, 2}) {
        rows_case(memory, columns, where, false, ctas);
        if (columns % 16 && where == 1 && columns < 256) rows_case(memory, columns, where, true, ctas);
      }
  report_clock("rows after");
}
