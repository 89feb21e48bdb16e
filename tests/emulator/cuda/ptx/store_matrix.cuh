// Stands for cuda_src/ptx/store_matrix.cuh: PTX ISA, "stmatrix".
#pragma once

namespace cuflash::ptx {

inline void store_matrix_x4(unsigned row, const unsigned (&d)[4]) {
  for (int i = 0; i < 4; ++i) {
    const unsigned to = emulated::exchange(row, i * 8 + emulated::lane() / 4);
    std::memcpy(emulated::shared_at(to, 16) + emulated::lane() % 4 * 4, &d[i], 4);
    emulated::wrote(to + emulated::lane() % 4 * 4, 4);
  }
  emulated::sync_warp();
}

}  // namespace cuflash::ptx
