// How caches store numbers, which Config::Stored names: in the type with which the kernel computes,
// or as bytes that are converted on their way into its tiles.
#pragma once

#include "sequence.cuh"

namespace cuflash {

// A matrix [rows, columns] of bytes as the copy engine writes it: a sequence of panels of 64 or 128
// columns. A panel is a sequence of rows; rows of 128 bytes have the 128-byte swizzle.
template <int rows_, int columns_>
struct BytePanels {
  static constexpr int rows = rows_;
  static constexpr int columns = columns_;
  static constexpr int row_bytes = columns <= 64 ? 64 : 128;
  static constexpr int count = (columns + row_bytes - 1) / row_bytes;
  static constexpr int panel_bytes = rows * row_bytes;
  static constexpr int bytes = count * panel_bytes;
  static_assert(rows % 8 == 0, "whole swizzle patterns");

  // The column of the tensor at which a panel begins.
  __device__ static constexpr int first_column(int panel) { return panel * row_bytes; }

  alignas(1024) unsigned char data[bytes];
};

// Caches hold numbers of the storage type.
struct StoredAsComputed {
  static constexpr bool converts = false;
  template <class Storage>
  using Cell = Storage;

  // Converts a number of an appended row to a cell of the cache.
  struct Row {
    template <class Storage>
    __device__ Storage operator()(Storage x) const {
      return x;
    }
  };
  template <class Params>
  __device__ static Row row_of(const Params&, bool, int, int) {
    return {};
  }
};

}  // namespace cuflash
