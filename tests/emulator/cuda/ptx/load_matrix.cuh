// Stands for cuda_src/ptx/load_matrix.cuh: PTX ISA, "Warp-level matrix load instruction: ldmatrix".
#pragma once

#include "../emulated.hpp"

namespace cuflash::ptx {

inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(static_cast<const unsigned char*>(pointer) - emulated::shared_base);
}

inline void load_matrix_x4(unsigned (&d)[4], unsigned row) {
  emulated::Warp& warp = emulated::warp();
  const int lane = emulated::lane();
  warp.word[lane] = row;
  emulated::sync_warp();
  for (int i = 0; i < 4; ++i) {
    const unsigned char* from = emulated::shared_at(warp.word[i * 8 + lane / 4], 16);
    std::memcpy(&d[i], from + lane % 4 * 4, 4);
  }
  emulated::sync_warp();
}

inline void load_matrix_x4(float (&d)[4], unsigned row) {
  unsigned bits[4];
  load_matrix_x4(bits, row);
  std::memcpy(d, bits, sizeof bits);
}

inline void load_matrix_x4_transposed(unsigned (&d)[4], unsigned row) {
  emulated::Warp& warp = emulated::warp();
  const int lane = emulated::lane();
  warp.word[lane] = row;
  emulated::sync_warp();
  for (int i = 0; i < 4; ++i) {
    std::uint16_t both[2];
    for (int which = 0; which < 2; ++which) {
      const unsigned address = warp.word[i * 8 + lane % 4 * 2 + which];
      std::memcpy(&both[which], emulated::shared_at(address, 16) + lane / 4 * 2, 2);
    }
    std::memcpy(&d[i], both, 4);
  }
  emulated::sync_warp();
}

}  // namespace cuflash::ptx
