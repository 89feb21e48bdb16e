// What threads write to shared memory reaches copy engine and products of a warpgroup only behind a
// fence of the thread that wrote. PTX ISA, "Proxies" and "Async proxy".
#pragma once

#include "fibers.hpp"

namespace emulated {

// What is told apart: the smallest that a thread writes.
constexpr unsigned kUnit = 2;

// By the current thread.
inline void wrote(unsigned address, unsigned bytes) {
  const auto me = static_cast<std::uint16_t>(current->index.x + 1);
  for (unsigned unit = address / kUnit; unit < (address + bytes) / kUnit; ++unit) {
    if (block->writers[unit] != me) current->unfenced.push_back(unit);
    block->writers[unit] = me;
  }
}

// Wherever that lies.
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

// Whether copy engine and products see what is there.
inline bool is_fenced(unsigned address) { return block->writers[address / kUnit] == 0; }

// By the copy engine.
inline void copied(unsigned address, unsigned bytes) {
  for (unsigned at = address; at < address + bytes; at += kUnit) {
    if (!is_fenced(at)) fail("a copy of or over what a thread wrote, without a fence behind it");
  }
}

}  // namespace emulated
