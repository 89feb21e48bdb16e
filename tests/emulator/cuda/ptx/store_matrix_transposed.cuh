// Stands for cuda_src/ptx/store_matrix_transposed.cuh: PTX ISA, "stmatrix", .trans.
#pragma once

#include "../emulated.hpp"

namespace cuflash::ptx {

inline void store_matrix_x4_transposed(unsigned row, const unsigned (&d)[4]) {
  emulated::Warp& warp = emulated::warp();
  const int lane = emulated::lane();
  warp.word[lane] = row;
  emulated::sync_warp();
  for (int i = 0; i < 4; ++i) {
    for (int which = 0; which < 2; ++which) {
      const unsigned to = warp.word[i * 8 + lane % 4 * 2 + which];
      const auto x = static_cast<std::uint16_t>(d[i] >> 16 * which);
      std::memcpy(emulated::shared_at(to, 16) + lane / 4 * 2, &x, 2);
      emulated::wrote(to + lane / 4 * 2, 2);
    }
  }
  emulated::sync_warp();
}

}  // namespace cuflash::ptx
