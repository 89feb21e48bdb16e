// Stands for cuda_src/ptx/tensor_copy.cuh. emulator/device.py makes the maps in place of the
// driver. A map holds an address, four sizes, three strides in bytes, the rows of a box, and the
// bytes of an element and of a row of a box. Rows of 64 bytes are not swizzled.
#pragma once

#include "load_matrix.cuh"

namespace cuflash::ptx {

constexpr unsigned long long kEvictFirst = 0;
constexpr unsigned long long kEvictLast = 0;

// Where a byte of a tile with the 128-byte swizzle lies.
inline unsigned swizzled(unsigned address) { return address ^ (address >> 7 & 7) << 4; }

inline void tensor_load(unsigned shared, const void* map, unsigned barrier, int column, int row,
                        int head, int batch, unsigned long long) {
  unsigned long long words[11];
  std::memcpy(words, map, sizeof words);
  const unsigned rows = static_cast<unsigned>(words[8]);
  const unsigned itemsize = static_cast<unsigned>(words[9]);
  const unsigned width = static_cast<unsigned>(words[10]);
  const bool swizzles = width == 128;
  if (shared % (swizzles ? 1024 : 128) != 0)
    emulated::fail("a box in shared memory that starts within a pattern");
  emulated::shared_at(shared, width);
  emulated::shared_at(shared + rows * width - 16, 16);
  const auto inside = [](int at, unsigned long long size) {
    return at >= 0 && static_cast<unsigned long long>(at) < size;
  };
  emulated::copy_later(barrier, rows * width, [=, address = words[0]] {
    emulated::copied(shared, rows * width);
    for (unsigned i = 0; i < rows; ++i) {
      const int at_row = row + static_cast<int>(i);
      const unsigned long long from =
          address + at_row * words[5] + head * words[6] + batch * words[7];
      for (unsigned j = 0; j < width / itemsize; ++j) {
        const int at_column = column + static_cast<int>(j);
        const bool valid = inside(at_column, words[1]) && inside(at_row, words[2]) &&
                           inside(head, words[3]) && inside(batch, words[4]);
        std::uint32_t x = 0;
        if (valid) {
          const void* element = reinterpret_cast<const void*>(from + itemsize * at_column);
          emulated::reads(element, itemsize);
          std::memcpy(&x, element, itemsize);
        }
        const unsigned to = shared + i * width + j * itemsize;
        std::memcpy(emulated::shared_base + (swizzles ? swizzled(to) : to), &x, itemsize);
      }
    }
  });
}

inline void tensor_map_prefetch(const void*) {}

}  // namespace cuflash::ptx
