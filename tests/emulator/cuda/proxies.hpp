// The copy engine and products of a warpgroup see a thread's writes to shared memory only after a
// fence of that thread. PTX ISA, "Proxies" and "Async proxy".
#pragma once

#include "fibers.hpp"

namespace emulated {

// Bytes of the smallest write of a thread; the writer of each such unit is known.
constexpr unsigned kUnit = 2;

// Notes a write of the current thread.
inline void wrote(unsigned address, unsigned bytes) {
  const auto me = static_cast<std::uint16_t>(current->index.x + 1);
  for (unsigned unit = address / kUnit; unit < (address + bytes) / kUnit; ++unit) {
    if (block->writers[unit] != me) current->unfenced.push_back(unit);
    block->writers[unit] = me;
  }
}

// Notes a write if the address lies in shared memory.
inline void wrote_if_shared(const void* pointer, unsigned bytes) {
  const auto* at = static_cast<const unsigned char*>(pointer);
  if (at < shared_base || at >= shared_base + shared_size) return;
  wrote(static_cast<unsigned>(at - shared_base), bytes);
}

inline void fence_shared() {
  const auto me = static_cast<std::uint16_t>(current->index.x + 1);
  for (const unsigned unit : current->unfenced) {
    if (block->writers[unit] == me) block->writers[unit] = 0;
  }
  current->unfenced.clear();
}

// Whether the copy engine and products see the bytes at an address.
inline bool is_fenced(unsigned address) { return block->writers[address / kUnit] == 0; }

// Checks the bytes that the copy engine reads or writes.
inline void copied(unsigned address, unsigned bytes) {
  for (unsigned at = address; at < address + bytes; at += kUnit) {
    if (!is_fenced(at)) fail("a copy of or over what a thread wrote, without a fence behind it");
  }
}

}  // namespace emulated
