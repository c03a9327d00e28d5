// Tensor maps of a matrix of 64 bf16 or 32 float32 per row, in boxes of some rows, swizzled by 128 bytes.
#pragma once
#include "common.cuh"

constexpr int ROW_BYTES = 128;

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                            CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                            CUtensorMapFloatOOBfill);

inline CUtensorMap rows_map(void* memory, long bytes, int box_rows, bool floats = false) {
  static Encode encode = nullptr;
  if (!encode) {
    cudaDriverEntryPointQueryResult found;
    CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void**)&encode, 12000,
                                           cudaEnableDefault, &found));
  }
  CUtensorMap map;
  const cuuint32_t columns = floats ? 32 : 64;
  const cuuint64_t sizes[] = {columns, (cuuint64_t)(bytes / ROW_BYTES)}, strides[] = {ROW_BYTES};
  const cuuint32_t box[] = {columns, (cuuint32_t)box_rows}, steps[] = {1, 1};
  if (encode(&map, floats ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, memory, sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)) {
    std::fprintf(stderr, "no tensor map\n");
    std::exit(1);
  }
  return map;
}
